"""Prompts from every kind of file, and what is said when a file does not hold any."""

import json
import logging
import os
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from fluxq.base.model import ModelFolder, resolve_model
from fluxq.calibrate import prompts
from fluxq.calibrate.prompts import COLUMNS, DATASETS, READERS, PromptRow, PromptSet, load_prompts

TEXTS = ("a red three, on black", 'a "quoted" ünïcode circle', "a blue square")


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    return ModelFolder("model", tmp_path / "model")


def write(path, text, encoding="utf-8"):
    path.write_text(text, encoding=encoding)
    return str(path)


def read(path, model):
    found = load_prompts(str(path), model)
    assert found.source == path.name
    return found.prompts


def test_text_is_one_prompt_a_line(tmp_path, model):
    path = tmp_path / "p.txt"
    write(path, f"  {TEXTS[0]}  \n\n{TEXTS[1]}\r\n   \n{TEXTS[2]}")
    assert read(path, model) == TEXTS


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("column", [*COLUMNS, "Prompt", "TEXT"])
def test_csv_column(tmp_path, model, column, encoding):
    path = tmp_path / "p.csv"
    quoted = [text.replace('"', '""') for text in TEXTS]
    write(path, f"{column},id\n" + "".join(f'"{text}",{i}\n' for i, text in enumerate(quoted)), encoding)
    assert read(path, model) == TEXTS


def test_jsonl_of_objects_and_of_strings(tmp_path, model):
    path = tmp_path / "p.jsonl"
    rows = [{"caption": TEXTS[0], "id": 1}, TEXTS[1], {"text": TEXTS[2]}]
    write(path, "\n\n".join(map(json.dumps, rows)))
    assert read(path, model) == TEXTS


@pytest.mark.parametrize("column", COLUMNS)
def test_parquet_column(tmp_path, model, column):
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3], column: list(TEXTS)}), path)
    assert read(path, model) == TEXTS


def test_an_empty_cell_of_a_table_is_named_by_its_row(tmp_path, model):
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [*TEXTS, None]}), path)
    with pytest.raises(ValueError, match=r"p\.parquet: row 4: the prompt is empty; fill it in, or take the row out$"):
        load_prompts(str(path), model)


def test_tsv_keeps_commas(tmp_path, model):
    path = tmp_path / "p.tsv"
    quoted = [text.replace('"', '""') for text in TEXTS]
    write(path, "id\tcaption\tfile\n" + "".join(f'{i}\t"{text}"\tf\n' for i, text in enumerate(quoted)))
    assert read(path, model) == TEXTS


@pytest.mark.parametrize(
    "content",
    [
        {
            "b": {"category": "x", "prompt": TEXTS[0]},
            "a": {"category": "y", "prompt": TEXTS[1]},
            "c": {"prompt": TEXTS[2]},
        },
        {"b": TEXTS[0], "a": TEXTS[1], "c": TEXTS[2]},
        list(TEXTS),
        [{"prompt": text} for text in TEXTS],
    ],
)
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_json_and_yaml_hold_entries_by_name_or_a_list(tmp_path, model, content, suffix):
    path = tmp_path / f"p.{suffix}"
    write(path, json.dumps(content, ensure_ascii=False))  # JSON is YAML
    assert read(path, model) == TEXTS


def test_of_several_captions_the_first_is_taken(tmp_path, model):
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"sentences": [[text, "another"] for text in TEXTS]}), path)
    assert read(path, model) == TEXTS


def test_odd_line_separators_within_a_prompt_do_not_split_it(tmp_path, model):
    path = tmp_path / "p.jsonl"
    write(path, json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False))
    assert read(path, model) == ("a\u2028b\x85c",)


def test_a_quoted_csv_field_may_hold_a_line_break(tmp_path, model):
    path = tmp_path / "p.csv"
    write(path, 'prompt,id\n"a\nb",1\n')
    assert read(path, model) == ("a\nb",)


def test_prompt_comes_before_caption_and_text(tmp_path, model):
    path = tmp_path / "p.csv"
    write(path, "text,caption,prompt\na,b,c\n")
    assert read(path, model) == ("c",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "p.jsonl:2: not a JSON object"),
        (
            "p.jsonl",
            '{"prompt": "a"}\n{"promt": "b"}\n',
            f"p.jsonl:2: no column called {', '.join(COLUMNS)}; found: promt",
        ),
        ("p.jsonl", '{"prompt": "a"}\n3\n', "p.jsonl:2: expected an object or a string, found int"),
        ("p.jsonl", "[1]\n", "p.jsonl:1: expected an object or a string, found list"),
        ("p.jsonl", "null\n", "p.jsonl:1: expected an object or a string, found NoneType"),
        ("p.csv", "promt\na\n", f"p.csv:1: no column called {', '.join(COLUMNS)}; found: promt"),
        ("p.csv", "", f"p.csv:1: no column called {', '.join(COLUMNS)}; found: none"),
        ("p.csv", "prompt\n", "p.csv: holds no prompts"),
        ("p.txt", "\n \n", "p.txt: holds no prompts"),
        ("p.jsonl", "", "p.jsonl: holds no prompts"),
        ("p.jsonl", '{"prompt": 3}\n', "p.jsonl:1: expected a prompt, found int"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": ""}\n', "p.jsonl:3: the prompt is empty; fill it in"),
        ("p.jsonl", '{"prompt": null}\n', "p.jsonl:1: the prompt is empty; fill it in"),
        ("p.jsonl", '{"captions": []}\n', "p.jsonl:1: the prompt is empty; fill it in"),
        ("p.jsonl", '{"captions": [3]}\n', "p.jsonl:1: expected a prompt, found int"),
        ("p.csv", 'prompt,id\n"a\nb",1\n" ",2\n', "p.csv:4: the prompt is empty; fill it in"),
        ("p.csv", "id,prompt\n1,a\n2\n", "p.csv:3: the prompt is empty; fill it in"),
        ("p.tsv", "prompt,id\na,1\n", f"p.tsv:1: no column called {', '.join(COLUMNS)}; found: prompt,id"),
        ("p.txt", "a\n\n" + "x" * 10_001, "p.txt:3: a prompt of 10001 characters"),
        ("p.json", '{"a": {"prompt": "x"}, "b": {}}', f"p.json: entry b: no column called {', '.join(COLUMNS)}; found"),
        ("p.json", '["a", 3]', "p.json: entry 2: expected an object or a string, found int"),
        ("p.json", '"a"', "p.json: expected prompts by name or a list of them, found str"),
        ("p.json", "{}", "p.json: holds no prompts"),
        ("p.json", '{"a": "b",\n}', "p.json:2: not JSON"),
        ("p.yaml", "a: [", "p.yaml: not YAML"),
        ("p.yaml", "!!python/object/apply:os.getcwd []", "p.yaml: not YAML"),
        ("p.yaml", "", "p.yaml: expected prompts by name or a list of them, found NoneType"),
        ("p.csv", "prompt\n" + "x" * 200_000 + "\n", "p.csv:2: a field of more than 131072 characters"),
        ("p.csv", 'prompt\n"unclosed\n', "p.csv:2: a quote is opened and never closed"),
        ("p.parquet", "no parquet", "p.parquet: damaged or no parquet file"),
        ("p.doc", "a", f"p.doc: prompt files end in {', '.join(READERS)}, not '.doc'"),
    ],
)
def test_a_bad_file_is_named_with_line_and_cure(tmp_path, model, name, content, message):
    source = write(tmp_path / name, content)
    with pytest.raises(ValueError) as caught:
        load_prompts(source, model)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def test_a_parquet_file_without_a_column_is_named(tmp_path, model):
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1]}), path)
    with pytest.raises(ValueError, match=r"p\.parquet: no column called .*; found: id"):
        load_prompts(str(path), model)


@pytest.mark.parametrize("name", ["p.txt", "p.csv", "p.jsonl"])
def test_a_file_that_is_no_text_is_named(tmp_path, model, name):
    path = tmp_path / name
    path.write_bytes(b"prompt\n\xff\xfe\xfa\n")
    with pytest.raises(ValueError, match=rf"{name}: not UTF-8 text"):
        load_prompts(str(path), model)


@pytest.mark.parametrize("name", ["gone.txt", "folder/gone.parquet", "gone.CSV"])
def test_a_missing_file_is_not_looked_for_on_the_hub(tmp_path, model, name):
    with pytest.raises(FileNotFoundError, match=r"prompt file '.*gone\..*' does not exist"):
        load_prompts(str(tmp_path / name), model)


@pytest.mark.slow
def test_a_dataset_that_cannot_be_reached_is_named(model, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub\nsecond line")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(FileNotFoundError, match=r"prompts 'someone/prompts': neither .*: Couldn't reach the Hub\. Get"):
        load_prompts("someone/prompts", model)
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: (_ for _ in ()).throw(ConnectionError()))
    with pytest.raises(FileNotFoundError, match=r"prompts 'someone/prompts': neither .*: ConnectionError\. Get"):
        load_prompts("someone/prompts", model)


def test_a_dataset_is_read_from_its_column(model, monkeypatch):
    import datasets

    table = datasets.Dataset.from_dict({"id": [0, 1, 2], "Caption": list(TEXTS)})
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: table)
    found = load_prompts("someone/prompts", model)
    assert found == texts("someone/prompts", TEXTS)


@pytest.mark.parametrize("name", ["COCO-2014", "yerevann/coco-karpathy", "coco-2014"])
def test_a_known_dataset_is_read_from_its_split_and_column(model, monkeypatch, name):
    import datasets

    table = datasets.Dataset.from_dict({"caption": ["no"] * 3, "sentences": [[text, "no"] for text in TEXTS]})
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: asked.append((name, split)) or table)
    assert load_prompts(name, model) == texts("COCO-2014", TEXTS)
    assert asked == [("yerevann/coco-karpathy", "test")]
    wrong = datasets.Dataset.from_dict({"caption": list(TEXTS)})
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: wrong)
    with pytest.raises(ValueError, match=r"yerevann/coco-karpathy: no column called sentences; found: caption"):
        load_prompts(name, model)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".yaml"])
def test_a_file_of_many_bytes_is_refused_before_it_is_read(tmp_path, model, suffix):
    with (tmp_path / f"p{suffix}").open("wb") as file:
        file.truncate(5 << 30)
    most = 16 if suffix == ".yaml" else 256
    with pytest.raises(ValueError, match=f"5120 MiB; at most {most} are read: make it shorter"):
        load_prompts(str(tmp_path / f"p{suffix}"), model)


def test_of_a_known_dataset_only_the_file_with_prompts_is_fetched(model, monkeypatch, tmp_path):
    path = tmp_path / "meta_data.json"
    write(path, json.dumps({f"id{i}": {"category": "art", "prompt": text} for i, text in enumerate(TEXTS)}))
    asked = []

    def download(*args, **kwargs):
        asked.append((args, kwargs))
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert load_prompts("MJHQ-30K", model) == texts("MJHQ-30K", TEXTS)
    assert asked == [(("playgroundai/MJHQ-30K", "meta_data.json"), {"repo_type": "dataset"})]


def test_a_known_dataset_that_cannot_be_had_says_what_to_get(model, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("offline mode\nsecond line")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(FileNotFoundError) as caught:
        load_prompts("MJHQ-30K", model)
    assert str(caught.value) == (
        "prompts 'MJHQ-30K': neither a file nor a dataset that can be reached: offline mode. Get meta_data.json of the "
        "dataset playgroundai/MJHQ-30K where there is a network, and give it with --prompts FILE"
    )
    with pytest.raises(FileNotFoundError, match=r"Get the 'train' split of the dataset sayakpaul/drawbench where"):
        load_prompts("DrawBench", model)
    with pytest.raises(
        FileNotFoundError, match=r"not on the hub: get captions_source\.tsv .*mlcommons/inference\) and give"
    ):
        load_prompts("MLPerf-COCO-2014", model)


def test_every_known_dataset_can_be_read():
    for row in DATASETS.values():
        assert row.file is None or any(row.file.endswith(suffix) for suffix in READERS)
        assert row.column.lower() in COLUMNS  # so a copy on disk is read as well
        assert row.repo or row.file


def test_a_folder_that_datasets_saved(tmp_path, model):
    import datasets

    table = datasets.Dataset.from_dict({"Prompts": list(TEXTS)})
    table.save_to_disk(tmp_path / "saved")
    assert load_prompts(str(tmp_path / "saved"), model) == texts("saved", TEXTS)
    datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "one")
    assert load_prompts(str(tmp_path / "one"), model).prompts == TEXTS
    datasets.DatasetDict({"test": table, "train": table}).save_to_disk(tmp_path / "two")
    with pytest.raises(ValueError, match=r"two: holds the splits test, train; give the folder of one of them$"):
        load_prompts(str(tmp_path / "two"), model)
    assert load_prompts(str(tmp_path / "two/train"), model).prompts == TEXTS
    with pytest.raises(
        ValueError, match=r"model: a folder that `datasets` cannot load \(.*\); give one that save_to_disk"
    ):
        load_prompts(str(model.path), model)


def test_duplicates_are_counted_and_said_once(tmp_path, model, caplog):
    path = write(tmp_path / "p.txt", "a\nb\na\n a \nc\n")
    with caplog.at_level(logging.WARNING, "fluxq"):
        found = load_prompts(path, model, shuffle=3)
    assert found.duplicates == 2 and len(found.prompts) == 5
    assert [record.getMessage() for record in caplog.records] == [f"{path}: 2 of 5 prompts occur more than once"]
    caplog.clear()
    load_prompts(write(tmp_path / "q.txt", "a\nb\n"), model)
    assert not caplog.records


def test_an_order_is_fixed_by_its_seed(tmp_path, model):
    names = [f"p{i}" for i in range(30)]
    path = write(tmp_path / "p.txt", "\n".join(names))
    shuffled = load_prompts(path, model, shuffle=12345)
    assert shuffled == load_prompts(path, model, shuffle=12345) != load_prompts(path, model, shuffle=0)
    assert sorted(shuffled.prompts) == sorted(names) and shuffled.source == "p.txt"
    # As a program that shuffles other things of the same number takes the same ones.
    others = list(range(30))
    random.Random(12345).shuffle(others)
    assert shuffled.prompts == tuple(f"p{i}" for i in others)
    assert shuffled.prompts[:4] == ("p1", "p14", "p12", "p16")


def test_default_is_the_model_s_own_set_or_the_bundled_one(model):
    bundled = load_prompts("default", model)
    assert bundled.source == "bundled" and len(bundled.prompts) == len(set(bundled.prompts)) == 64
    (model.path / "fluxq_prompts.txt").write_text("a\nb\n")
    assert load_prompts("default", model) == texts("model/fluxq_prompts.txt", ("a", "b"))
    assert load_prompts("default", resolve_model("tiny")).source == "tiny/fluxq_prompts.txt"


def test_digest_depends_on_texts_and_order_but_not_on_the_source():
    one = texts("a", TEXTS)
    assert one.digest == texts("b", TEXTS).digest
    assert one.digest != texts("a", TEXTS[::-1]).digest != texts("a", TEXTS[:2]).digest


def test_a_fifo_is_refused_before_anything_is_asked_for_it(tmp_path, model) -> None:
    os.mkfifo(tmp_path / "p.txt")
    for source in (tmp_path / "p.txt", Path("/dev/zero")):
        with pytest.raises(ValueError, match="a FIFO or device, which ends nowhere"):
            load_prompts(str(source), model)


# What is small on disk


def refused(tmp_path: Path, name: str, model, most: int) -> str:
    """Return the error about a file; check that it took less than `most` bytes of Python's and Arrow's memory."""
    usual = pyarrow.default_memory_pool()
    watched = pyarrow.proxy_memory_pool(usual)
    pyarrow.set_memory_pool(watched)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=name) as caught:
            load_prompts(str(tmp_path / name), model)
        assert tracemalloc.get_traced_memory()[1] + watched.max_memory() < most
    finally:
        tracemalloc.stop()
        pyarrow.set_memory_pool(usual)
    return str(caught.value)


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("prompt", pyarrow.array(["a" * 6_000_000] * 64)),
        ("captions", pyarrow.array([["b" * 9_000] * 1_000] * 40)),
        ("text", pyarrow.array(["c" * 9_000] * 40_000).dictionary_encode()),
    ],
    ids=["wide", "lists", "dictionary"],
)
def test_a_table_is_refused_before_it_is_unpacked(tmp_path, model, column, values):
    """R18: a wide .parquet, lists of texts that recur, and a dictionary's."""
    pyarrow.parquet.write_table(pyarrow.table({column: values}), tmp_path / "p.parquet", compression="zstd")
    assert (tmp_path / "p.parquet").stat().st_size < 100_000
    said = refused(tmp_path, "p.parquet", model, 64 << 20)
    assert said.endswith("more than 256 MiB of text unpacked; make it shorter")


@pytest.mark.slow
def test_a_table_of_too_many_texts_is_refused(tmp_path, model):
    """R18: in one row, so that no limit of rows sees them."""
    pyarrow.parquet.write_table(pyarrow.table({"captions": [["b"] * (1 << 22), ["c"]]}), tmp_path / "p.parquet")
    assert refused(tmp_path, "p.parquet", model, 64 << 20).endswith(
        "texts and numbers; at most 4194304 are read: make it shorter"
    )


def test_what_recurs_in_a_table_is_read_as_often_as_it_does(tmp_path, model):
    """R18: texts are kept as a dictionary while they are read, in several groups of rows too."""
    names = [f"{text} {i % 5}" for i in range(100) for text in TEXTS]
    table = pyarrow.table({"prompt": names, "height": [16] * len(names)})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet", row_group_size=70)
    assert read(tmp_path / "p.parquet", model) == tuple(names)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.txt", "\n" * 9_000, ":4001: a line too many; check that this is a file of prompts"),
        ("p.txt", "a" * 2_000_000, ":1: a line of more than 1048576 characters; check that this is a file of prompts"),
        ("p.txt", "ab\n" * 3_000_000, ": more than 1000 prompts, which are the most that are read; make it shorter"),
        ("p.json", "[]" + " " * (17 << 20), ": 17 MiB; at most 16 are read: make it shorter"),
        (
            "p.yaml",
            "- a\n" * 2_500,
            ": not YAML (more than 2000 values, with what its aliases stand for; make it shorter, or a .jsonl file)",
        ),
        (
            "p.yaml",
            "- &a {prompt: x}\n"
            + "".join(f"- &{b} {{<<: [*{a}, *{a}]}}\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)),
            ": not YAML (more than 2000 values, with what its aliases stand for; make it shorter, or a .jsonl file)",
        ),
    ],
)
def test_text_is_refused_before_its_memory_is_spent(tmp_path, model, monkeypatch, name, text, said):
    """R18: lines are looked at one after the other, documents that are parsed as a whole are short."""
    monkeypatch.setattr(prompts, "_MAX_ROWS", 1_000)
    monkeypatch.setattr(prompts, "_MAX_LINES", 4_000)
    monkeypatch.setattr(prompts, "_MAX_VALUES_OF_YAML", 2_000)
    write(tmp_path / name, text)
    assert refused(tmp_path, name, model, 8 << 20) == f"{tmp_path / name}{said}"


def texts(source: str, prompts: Sequence[str]) -> PromptSet:
    """A set of prompts without arguments."""
    return PromptSet(source, tuple(map(PromptRow, prompts)))
