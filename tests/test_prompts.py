"""Prompts from every kind of file, and what is said when a file does not hold any."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from fluxq.base.model import ModelFolder, resolve_model
from fluxq.calibrate.prompts import COLUMNS, PromptSet, load_prompts

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
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3, 4], column: [*TEXTS, None]}), path)
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
            "p.jsonl:2: no column called prompt, caption, text; found: promt",
        ),
        ("p.jsonl", '{"prompt": "a"}\n3\n', "p.jsonl:2: expected an object or a string, found int"),
        ("p.jsonl", "[1]\n", "p.jsonl:1: expected an object or a string, found list"),
        ("p.jsonl", "null\n", "p.jsonl:1: expected an object or a string, found NoneType"),
        ("p.csv", "promt\na\n", "p.csv:1: no column called prompt, caption, text; found: promt"),
        ("p.csv", "", "p.csv:1: no column called prompt, caption, text; found: none"),
        ("p.csv", "prompt\n", "p.csv: holds no prompts"),
        ("p.txt", "\n \n", "p.txt: holds no prompts"),
        ("p.jsonl", "", "p.jsonl: holds no prompts"),
        ("p.jsonl", '{"prompt": 3}\n', "p.jsonl: holds no prompts"),
        ("p.csv", "prompt\n" + "x" * 200_000 + "\n", "p.csv:2: field larger than field limit"),
        ("p.parquet", "no parquet", "p.parquet: damaged or no parquet file"),
        ("p.doc", "a", "p.doc: prompt files end in .txt, .jsonl, .csv, .parquet, not '.doc'"),
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
    with pytest.raises(ValueError, match=r"p\.parquet: no column called prompt, caption, text; found: id"):
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


def test_a_dataset_that_cannot_be_reached_is_named(model, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub\nsecond line")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(FileNotFoundError, match=r"prompts 'someone/prompts': neither .*: Couldn't reach the Hub$"):
        load_prompts("someone/prompts", model)
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: (_ for _ in ()).throw(ConnectionError()))
    with pytest.raises(FileNotFoundError, match=r"prompts 'someone/prompts': neither .*: ConnectionError$"):
        load_prompts("someone/prompts", model)


def test_a_dataset_is_read_from_its_column(model, monkeypatch):
    import datasets

    table = datasets.Dataset.from_dict({"id": [0, 1, 2], "Caption": list(TEXTS)})
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: table)
    found = load_prompts("someone/prompts", model)
    assert found == PromptSet("someone/prompts", TEXTS)


def test_default_is_the_model_s_own_set_or_the_bundled_one(model):
    bundled = load_prompts("default", model)
    assert bundled.source == "bundled" and len(bundled.prompts) == len(set(bundled.prompts)) == 64
    (model.path / "fluxq_prompts.txt").write_text("a\nb\n")
    assert load_prompts("default", model) == PromptSet("model/fluxq_prompts.txt", ("a", "b"))
    assert load_prompts("default", resolve_model("tiny")).source == "tiny/fluxq_prompts.txt"


def test_digest_depends_on_texts_and_order_but_not_on_the_source():
    one = PromptSet("a", TEXTS)
    assert one.digest == PromptSet("b", TEXTS).digest
    assert one.digest != PromptSet("a", TEXTS[::-1]).digest != PromptSet("a", TEXTS[:2]).digest
