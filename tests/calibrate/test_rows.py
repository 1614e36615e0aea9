"""Rows that say more than a prompt: read from files, passed to real pipelines, captured and replayed."""

import json
import logging
import random
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import diffusers
import pyarrow
import pyarrow.parquet
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image
from tiny_configs import TINY_CONFIGS
from torch import nn

from fluxq import tiny
from fluxq.base.model import ModelFolder
from fluxq.calibrate import prompts as reading
from fluxq.calibrate.blocks import Replay, block_names
from fluxq.calibrate.calls import Calls, capture_calls
from fluxq.calibrate.capture import (
    Sampling,
    Trajectory,
    batches,
    capture_statistics,
    number_of_steps,
    run_pipeline,
    steps_to_see,
    trajectory_of,
)
from fluxq.calibrate.prompts import ARGUMENTS, PromptRow, load_prompts
from fluxq.calibrate.sensitivity import noise_level_weights
from fluxq.calibrate.statistics import Statistics
from fluxq.jobs import making
from fluxq.recipes.all_families import FAMILIES


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with two pictures, one of another format, and a mask of the left half."""
    noise = torch.Generator().manual_seed(0)
    for name in ("one.png", "two.png", "three.webp"):
        pixels = torch.randint(0, 256, (24, 32, 3), generator=noise, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / name)
    mask = Image.new("L", (32, 24), 0)
    mask.paste(255, (0, 0, 16, 24))
    mask.save(tmp_path / "mask.png")
    return tmp_path


def rows_of(folder: Path, rows: list, pipeline: type = diffusers.FluxControlInpaintPipeline, name: str = "p.jsonl"):
    path = folder / name
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if name.endswith(".parquet"):
        table = pyarrow.table({column: [row.get(column) for row in rows] for column in columns})
        pyarrow.parquet.write_table(table, path)
    elif name.endswith((".csv", ".tsv")):
        lines = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
        path.write_text("".join(("," if name.endswith("csv") else "\t").join(line) + "\n" for line in lines))
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if name.endswith("jsonl") else json.dumps(rows))
    return load_prompts(str(path), ModelFolder("model", folder), pipeline=pipeline)


# Files


@pytest.mark.parametrize("suffix", ["jsonl", "json", "yaml", "csv", "tsv", "parquet"])
def test_every_kind_of_table_gives_the_same_rows(folder, suffix):
    whole = [
        {"prompt": "a", "Height": 512, "guidance": 3.5, "image": "one.png", "mask": "mask.png", "id": 7},
        {"prompt": "b", "width": 256, "control_image": "three.webp"},
    ]
    found = rows_of(folder, whole, name=f"p.{suffix}")
    first, second = (dict(row.arguments) for row in found.rows)
    assert found.prompts == ("a", "b")
    assert first.keys() == {"height", "guidance_scale", "image", "mask_image"}
    assert (first["height"], first["guidance_scale"]) == (512, 3.5) and type(first["height"]) is int
    assert first["image"].load().mode == "RGB" and first["mask_image"].load().mode == "L"
    assert second.keys() == {"width", "control_image"} and second["width"] == 256
    with Image.open(folder / "one.png") as image:
        assert first["image"].load().tobytes() == image.tobytes()


def test_every_column_is_an_argument_of_some_pipeline():
    import inspect

    classes = [getattr(diffusers, f"{name}Pipeline") for name in ("FluxControlInpaint", "QwenImage", "WanImageToVideo")]
    taken = {name for cls in classes for name in inspect.signature(cls.__call__).parameters}
    assert {name for name, _ in ARGUMENTS.values()} <= taken


def test_without_a_pipeline_prompts_alone_are_read(folder):
    found = rows_of(folder, [{"prompt": "a", "image": "gone.png", "height": "tall"}], pipeline=None)
    assert found.rows == (PromptRow("a"),)


def test_pictures_in_a_table_are_not_read_for_its_prompts_alone(folder, monkeypatch):
    monkeypatch.setattr(reading, "_MAX_TABLE", 10_000)
    rows = [{"prompt": "a", "image": {"bytes": random.Random(0).randbytes(20_000), "path": "0.png"}}]
    assert rows_of(folder, rows, None, "p.parquet").rows == (PromptRow("a"),)
    with pytest.raises(ValueError, match="of text unpacked"):
        rows_of(folder, rows, name="p.parquet")


def test_a_set_of_plain_prompts_is_what_it_was(folder):
    path = folder / "p.txt"
    path.write_text("a\nb\n")
    model = ModelFolder("m", folder)
    plain, typed = (load_prompts(str(path), model, pipeline=p) for p in (None, diffusers.FluxPipeline))
    assert plain == typed and plain.digest == typed.digest


def test_a_column_that_the_pipeline_does_not_take_is_named(folder):
    with pytest.raises(ValueError) as caught:
        rows_of(folder, [{"prompt": "a"}, {"prompt": "b", "mask": "mask.png"}], diffusers.FluxPipeline)
    assert str(caught.value) == (
        f"{folder}/p.jsonl:2: column 'mask' is the argument mask_image, which FluxPipeline does not take; rename the "
        "column or take it out"
    )


def test_a_misspelled_column_is_warned_of_once_and_others_are_ignored(folder, caplog):
    rows = [{"prompt": "a", "heigth": 512, "id": 1, "style": "x", "negative_promt": "n"}] * 2
    with caplog.at_level(logging.WARNING, "fluxq"):
        found = rows_of(folder, [{**row, "prompt": str(i)} for i, row in enumerate(rows)])
    assert not any(row.arguments for row in found.rows)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}/p.jsonl:1: column 'heigth' is ignored; did you mean 'height'?",
        f"{folder}/p.jsonl:1: column 'negative_promt' is ignored; did you mean 'negative_prompt'?",
    ]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("image", "/etc/passwd", "is not a path within the folder of the prompt file; put"),
        ("image", "../one.png", "is not a path within the folder"),
        ("image", "a/../../one.png", "is not a path within the folder"),
        ("image", "..\\one.png", "is not a path within the folder"),
        ("image", "C:/one.png", "is not a path within the folder"),
        ("image", "link.png", "is not a path within the folder"),
        ("image", "gone.png", "image 'gone.png' does not exist in"),
        ("image", "", "expected the path of an image file, found ''"),
        ("image", "a\0b", "expected the path of an image file, found"),
        ("image", {"bytes": "x"}, "expected the path of an image file, found dict"),
        ("image", "p.jsonl", "damaged, or no image of the formats PNG, JPEG, WEBP"),
        ("image", "cut.png", "damaged, or no image"),
        ("image", "drawing.tiff", "damaged, or no image"),
        ("image", "bomb.png", "an image of 8193x8193 pixels; at most 67108864 are read: make it smaller"),
        ("image", "worse.png", "an image of far too many pixels"),
        ("height", 0, "expected a whole number from 1 to 16384, found 0"),
        ("height", 1.5, "expected a whole number from 1 to 16384, found 1.5"),
        ("width", 1e30, "expected a whole number from 1 to 16384, found 1e+30"),
        ("width", "tall", "expected a number that is not negative, found 'tall'"),
        ("width", True, "expected a number that is not negative, found True"),
        ("guidance", -1, "expected a number that is not negative, found -1"),
        ("guidance", 1e999, "expected a number that is not negative, found inf"),
        ("guidance", [1], "expected a number that is not negative, found list"),
    ],
)
def test_a_bad_value_is_named_with_its_place(folder, column, value, message):
    (folder.parent / f"{folder.name}-outside.png").write_bytes((folder / "one.png").read_bytes())
    (folder / "link.png").symlink_to(folder.parent / f"{folder.name}-outside.png")
    (folder / "cut.png").write_bytes((folder / "one.png").read_bytes()[:-900])
    Image.new("RGB", (8, 8)).save(folder / "drawing.tiff")
    for name, side in (("bomb.png", 8193), ("worse.png", 60_000)):  # a header alone, no pixels
        head = bytearray((folder / "one.png").read_bytes())
        head[16:24] = side.to_bytes(4, "big") * 2
        head[29:33] = zlib.crc32(bytes(head[12:29])).to_bytes(4, "big")
        (folder / name).write_bytes(head)
    with pytest.raises(ValueError) as caught:
        rows_of(folder, [{"prompt": "a", column: value}])
    assert str(caught.value).startswith(f"{folder}/p.jsonl:1: column '{column}': ") and message in str(caught.value)


def test_even_a_full_path_into_the_folder_is_refused(folder):
    with pytest.raises(ValueError, match=r"is not a path within the folder of the prompt file"):
        rows_of(folder, [{"prompt": "a", "image": str(folder / "one.png")}])


def test_two_columns_of_one_argument_are_refused(folder):
    with pytest.raises(ValueError, match="two columns are the argument mask_image; take out 'mask_image' or the other"):
        rows_of(folder, [{"prompt": "a", "mask": "mask.png", "mask_image": "mask.png"}])


def test_a_negative_prompt_is_text_and_may_be_empty_where_a_file_can_say_so(folder):
    rows = [{"prompt": "a", "negative_prompt": ""}]
    assert dict(rows_of(folder, rows, diffusers.FluxPipeline).rows[0].arguments) == {"negative_prompt": ""}
    assert rows_of(folder, rows, diffusers.FluxPipeline, "p.csv").rows[0].arguments == ()
    with pytest.raises(ValueError, match="column 'negative_prompt': expected a text of at most 10000 characters"):
        rows_of(folder, [{"prompt": "a", "negative_prompt": "x" * 10_001}], diffusers.FluxPipeline)


def test_damaged_exif_data_is_passed_over(folder):
    exif = Image.Exif()
    exif[274], exif[282] = 6, 72.0  # orientation and resolution, which then calls itself the width
    damaged = exif.tobytes().replace(b"\x01\x1a", b"\x01\x00", 1)
    Image.open(folder / "one.png").save(folder / "phone.jpg", exif=damaged)
    [row] = rows_of(folder, [{"prompt": "a", "image": "phone.jpg"}]).rows
    assert dict(row.arguments)["image"].load().size == (24, 32)  # the orientation is whole


def test_an_image_that_changes_after_it_was_read_is_refused(folder):
    [row] = rows_of(folder, [{"prompt": "a", "image": "one.png"}]).rows
    (folder / "one.png").write_bytes((folder / "two.png").read_bytes())
    with pytest.raises(ValueError, match=r"one\.png: the image has changed since the prompts were read; start again"):
        dict(row.arguments)["image"].load()


# Identity


def trajectory(items) -> Trajectory:
    pipe = tiny.load()
    return trajectory_of(pipe, {"transformer": "m"}, items, {"height": 16}, (0,))


def test_the_digest_knows_images_by_their_bytes_and_plain_prompts_as_ever(folder):
    one, two = rows_of(folder, [{"prompt": "a", "image": n, "height": 8} for n in ("one.png", "two.png")]).rows
    made = trajectory([(one, 3)])
    assert made.items[0][:2] == ("a", 3) and made.items[0][2]["height"] == 8
    assert made.items[0][2]["image"] == f"sha256:{dict(one.arguments)['image'].sha256}"
    (folder / "copy.png").write_bytes((folder / "one.png").read_bytes())
    [copy] = rows_of(folder, [{"prompt": "a", "image": "copy.png", "height": 8}]).rows
    assert trajectory([(copy, 3)]).digest == made.digest != trajectory([(two, 3)]).digest
    assert str(folder) not in json.dumps(made.items)
    assert trajectory([(PromptRow("a"), 3)]).items == (("a", 3),)
    assert trajectory([(PromptRow("a"), 3)]).digest == trajectory([("a", 3)]).digest


def test_a_set_s_digest_covers_its_arguments(folder):
    sets = [[{"prompt": "a"}], [{"prompt": "a", "height": 8}], [{"prompt": "a", "image": "one.png"}]]
    assert len({rows_of(folder, rows).digest for rows in sets}) == 3


def test_the_same_prompt_at_another_size_is_no_duplicate(folder, caplog):
    with caplog.at_level(logging.WARNING, "fluxq"):
        rows_of(folder, [{"prompt": "a", "height": 8}, {"prompt": "a", "height": 16}])
    assert not caplog.records


def test_rows_are_shuffled_with_what_belongs_to_them(folder):
    path = folder / "p.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"p{i}", "height": i + 1}) for i in range(30)))
    found = load_prompts(str(path), ModelFolder("m", folder), shuffle=12345, pipeline=diffusers.FluxPipeline)
    assert found.prompts[:4] == ("p1", "p14", "p12", "p16")
    assert all(dict(row.arguments)["height"] == int(row.prompt[1:]) + 1 for row in found.rows)


# Batches


def row(prompt: str, **arguments) -> PromptRow:
    return PromptRow(prompt, tuple(sorted(arguments.items())))


def test_rows_share_a_call_with_rows_that_say_the_same_but_for_texts(folder):
    image = dict(rows_of(folder, [{"prompt": "a", "image": "one.png"}]).rows[0].arguments)["image"]
    rows = [
        row("a", height=8, negative_prompt="x"),
        row("b"),
        row("c", height=8, negative_prompt="y"),
        row("d", height=8),
        row("e", height=16, negative_prompt="x"),
        row("f", image=image),
        row("g", image=image),
        PromptRow("h"),
    ]
    made = [[r.prompt for r, _ in batch] for batch in batches([(r, i) for i, r in enumerate(rows)], 8)]
    assert made == [["a", "c"], ["b", "h"], ["d"], ["e"], ["f"], ["g"]]
    plain = [(f"p{i}", i) for i in range(5)]
    assert list(batches(plain, 2)) == [plain[:2], plain[2:4], plain[4:]]


def test_a_batch_is_a_megapixel_of_the_rows_own_size():
    items = [(row("a", height=512, width=512), i) for i in range(6)] + [(row("b", height=1024), 9)]
    assert [len(batch) for batch in batches(items, None, {"width": 1024, "height": 128})] == [4, 2, 1]


@pytest.mark.parametrize(
    ("steps", "total", "seen"), [(2, 8, 8), (1, 4, 4), (8, 8, 8), (2, 9, 2), (8, 28, 8), (30, 28, 30), (9, 8, 9)]
)
def test_of_few_steps_all_are_looked_at(steps, total, seen, caplog):
    with caplog.at_level(logging.INFO, "fluxq"):
        assert steps_to_see(steps, total) == seen
    assert len(caplog.records) == (seen != steps)


# Pipelines: diffusers' own loops with small random models; only texts are embedded here

STEPS = 2
TOKENS = 5


def embedded(texts: list[str], *shape: int) -> torch.Tensor:
    """A tensor (B, *shape) that each text has of its own."""
    seeds = [torch.Generator().manual_seed(zlib.crc32(text.encode())) for text in texts]
    return torch.stack([torch.randn(shape, generator=seed) for seed in seeds])


class SD3(diffusers.StableDiffusion3Pipeline):
    def encode_prompt(self, prompt, *_args, negative_prompt=None, **_kwargs):
        both = (prompt, negative_prompt)
        return *(embedded(t, TOKENS, 64) for t in both), *(embedded(t, 64) for t in both)


class QwenImage(diffusers.QwenImagePipeline):
    def encode_prompt(self, prompt, *_args, **_kwargs):
        return embedded(prompt, TOKENS, 64), torch.ones(len(prompt), TOKENS, dtype=torch.int64)


class QwenImageEdit(diffusers.QwenImageEditPipeline):
    encode_prompt = QwenImage.encode_prompt


class Wan(diffusers.WanPipeline):
    def encode_prompt(self, prompt, negative_prompt=None, do_classifier_free_guidance=True, **_kwargs):
        negative = embedded(negative_prompt, TOKENS, 64) if do_classifier_free_guidance else None
        return embedded(prompt, TOKENS, 64), negative


class WanImageToVideo(diffusers.WanImageToVideoPipeline):
    encode_prompt = Wan.encode_prompt


def model_of(family: str, **changes) -> nn.Module:
    torch.manual_seed(0)
    return getattr(diffusers, FAMILIES[family].model).from_config({**TINY_CONFIGS[family], **changes})


def flow() -> diffusers.FlowMatchEulerDiscreteScheduler:
    return diffusers.FlowMatchEulerDiscreteScheduler()


def sd3() -> SD3:
    vae = diffusers.AutoencoderKL(latent_channels=4, block_out_channels=(8,), norm_num_groups=1)
    return SD3(model_of("sd3"), flow(), vae, None, None, None, None, None, None)


def qwen(cls=QwenImage):
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    rest = {"processor": None} if cls is QwenImageEdit else {}
    return cls(scheduler=flow(), vae=vae, text_encoder=None, tokenizer=None, transformer=model_of("qwen_image"), **rest)


def wan(cls=Wan, **changes):
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    model = model_of("wan", image_dim=None, added_kv_proj_dim=None, **changes)
    return cls(tokenizer=None, text_encoder=None, vae=vae, scheduler=flow(), transformer=model)


def flux(cls, channels: int = 16):
    """The embedded pipeline's parts, in the class of another; more input channels need a transformer of their own."""
    parts = {name: part for name, part in tiny.load(dtype="float32").components.items() if part is not None}
    if channels != 16:
        parts["transformer"] = model_of("flux", in_channels=channels, out_channels=16)
    return cls(**parts)


def capture(pipe, items, call, folder: Path, held=(), most=None) -> Calls:
    blocks = block_names(FAMILIES[family_name(pipe)], pipe.transformer)
    pipe.set_progress_bar_config(disable=True)
    return capture_calls(
        pipe,
        {"transformer": blocks},
        items,
        list(held),
        Sampling({"num_inference_steps": STEPS, **call}, STEPS, {"transformer": "m"}),
        folder=folder,
        most=most,
    )["transformer"]


def statistics(pipe, items, call) -> Statistics:
    path = next(name for name, _ in pipe.transformer.named_modules() if name.endswith("to_q"))
    call = {"num_inference_steps": STEPS, **call}
    with TemporaryDirectory() as folder:
        sampling = Sampling(call, STEPS, {"transformer": "m"})
        return capture_statistics(pipe, {"transformer": {"q": path}}, items, sampling, folder=Path(folder))


def family_name(pipe) -> str:
    return next(name for name, row in FAMILIES.items() if row.model == type(pipe.transformer).__name__)


def inputs_of(calls: Calls) -> list[dict]:
    return [call.load(torch.device("cpu"))[1] for call in calls.calls]


GUIDED = [(row("a cat", negative_prompt="a dog"), 1), (row("a tree", negative_prompt="a bush"), 2)]


@pytest.mark.parametrize(
    ("make", "call", "calls_per_step"),
    [
        (sd3, {"height": 8, "width": 8, "guidance_scale": 4.0}, 1),  # both branches in one call
        (qwen, {"height": 32, "width": 32, "true_cfg_scale": 4.0}, 2),
        (wan, {"height": 16, "width": 16, "num_frames": 1, "guidance_scale": 4.0}, 2),
    ],
    ids=["sd3", "qwen", "wan"],
)
def test_both_branches_of_guidance_are_seen_and_kept(make, call, calls_per_step, tmp_path):
    pipe = make()
    calls = capture(pipe, GUIDED, call, tmp_path)
    assert [c.step for c in calls.calls] == [0] * calls_per_step + [1] * calls_per_step
    texts = embedded(["a cat", "a tree", "a dog", "a bush"], TOKENS, 64)
    for step in range(STEPS):
        seen = [k for k, c in zip(inputs_of(calls), calls.calls, strict=True) if c.step == step]
        given = torch.cat([k["encoder_hidden_states"] for k in seen])
        assert given.shape[0] == 4
        assert all(any(torch.equal(text, one) for one in given) for text in texts)
    scale = "true_cfg_scale" if "true_cfg_scale" in call else "guidance_scale"
    guided, alone = (statistics(pipe, GUIDED, {**call, scale: value}).groups["q"].count for value in (4.0, 1.0))
    assert torch.equal(guided, 2 * alone) and alone.min() > 0
    replays_to_the_bit(pipe.transformer, calls)


def replays_to_the_bit(model: nn.Module, calls: Calls) -> None:
    """Every Linear of every block sees in replay what it sees when the captured calls run through the model."""
    inside = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(name.startswith(f"{block}.") for block in calls.blocks)
    ]

    def seen(run) -> dict[str, list[torch.Tensor]]:
        found = {name: [] for name in inside}
        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda _m, x, name=name: found[name].append(x[0].clone())
            )
            for name in inside
        ]
        run()
        for handle in handles:
            handle.remove()
        return found

    @torch.no_grad()
    def whole() -> None:
        for call in calls.calls:
            args, kwargs = call.load(torch.device("cpu"))
            model(*args, **kwargs)

    def by_block() -> None:
        for block in Replay(model, calls, calls.calls[0].file.parent / "outputs"):
            path = next(name for name in inside if name.startswith(f"{block.name}."))
            block.observe({"x": path}, advance=True)

    one, two = seen(whole), seen(by_block)
    for name in inside:
        assert len(one[name]) == len(two[name]) == len(calls.calls)
        assert all(map(torch.equal, one[name], two[name])), name


FLUX_CALL = {"height": 16, "width": 16, "max_sequence_length": 8, "guidance_scale": 1.0}
KONTEXT = {**FLUX_CALL, "_auto_resize": False}
EDIT = {"height": 32, "width": 32, "true_cfg_scale": 4.0}
VIDEO = {"height": 16, "width": 16, "guidance_scale": 4.0}


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("make", "call", "columns", "tokens"),
    [
        (lambda: flux(diffusers.FluxFillPipeline, 48), FLUX_CALL, {"image": "one.png", "mask": "mask.png"}, 16),
        (lambda: flux(diffusers.FluxControlPipeline, 32), FLUX_CALL, {"control_image": "one.png"}, 16),
        (lambda: flux(diffusers.FluxKontextPipeline), KONTEXT, {"image": "one.png"}, 16 + 48),
        (lambda: qwen(QwenImageEdit), EDIT, {"image": "one.png", "negative_prompt": "a dog"}, 4 + 16),
        (
            lambda: wan(WanImageToVideo, in_channels=12),
            VIDEO,
            {"image": "one.png", "last_image": "three.webp", "negative_prompt": "a dog", "frames": 5},
            None,
        ),
    ],
    ids=["fill", "control", "kontext", "qwen-edit", "wan-i2v"],
)
def test_images_reach_the_transformer(make, call, columns, tokens, folder, monkeypatch):
    """The same prompt and noise with another image: other calls; each row with its image alone, with its own noise."""
    own = pipeline_qwenimage_edit.calculate_dimensions  # which makes a megapixel of everything
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda _area, ratio: own(64 * 64, ratio))
    pipe = make()
    other = {key: value.replace("one.png", "two.png") if key != "frames" else value for key, value in columns.items()}
    rows = rows_of(folder, [{"prompt": "a cat", **what} for what in (columns, other, columns)], type(pipe)).rows
    calls = capture(pipe, list(zip(rows, (1, 1, 2), strict=True)), call, folder / "calls")
    given = [kwargs["hidden_states"] for kwargs in inputs_of(calls)]
    branches = 2 if "negative_prompt" in columns else 1
    assert len(given) == 3 * STEPS * branches and all(x.shape[0] == 1 for x in given)
    assert tokens is None or all(x.shape[1] == tokens for x in given)
    assert tokens is not None or given[0].shape[2] == 2  # five frames in the latent's time
    first, second, third = (given[i * STEPS * branches] for i in range(3))
    assert first.shape == second.shape and not torch.equal(first, second) and not torch.equal(first, third)
    replays_to_the_bit(pipe.transformer, calls)
    again = capture(pipe, [(rows[2], 2)], call, folder / "alone")
    assert torch.equal(inputs_of(again)[0]["hidden_states"], third)


@pytest.mark.often(1)
@pytest.mark.parametrize(("strength", "made"), [(None, 3), (0.5, 2), (0.6, 3), (0.7, 3), (0.75, 3), (1.0, 4)])
def test_of_an_image_only_the_steps_that_are_made_are_looked_at(strength, made, folder):
    """Of four steps, of which the pipeline's own strength, .6, leaves three: what is recorded is what ran."""
    pipe = flux(diffusers.FluxImg2ImgPipeline)
    pipe.set_progress_bar_config(disable=True)
    call = {**FLUX_CALL, "num_inference_steps": 4, **({"strength": strength} if strength else {})}
    [item] = rows_of(folder, [{"prompt": "a cat", "image": "one.png"}], type(pipe)).rows
    steps = number_of_steps(pipe, call)
    [found] = capture_calls(
        pipe,
        {"transformer": block_names(FAMILIES["flux"], pipe.transformer)},
        [(item, 1)],
        [],
        Sampling(call, steps, {"transformer": "m"}),
        folder=folder / "calls",
    ).values()
    sigmas = tuple(1 - step / 4 for step in range(4 - made, 4))
    assert (steps, [each.step for each in found.calls]) == (made, list(range(made)))
    assert list(found.trajectory["steps_seen"]) == list(range(made))
    assert tuple(found.trajectory["sigmas"]) == pytest.approx(sigmas)
    seen = [float(k["timestep"]) for k in inputs_of(found)]
    assert seen == pytest.approx(sigmas, abs=1e-2)  # in the model's 16 bit


SIZES = [
    (row(prompt, height=height, width=width), 100 + i)
    for i, (prompt, height, width) in enumerate(
        [(tiny.PROMPTS[0], 16, 16), (tiny.PROMPTS[1], 32, 16), (tiny.PROMPTS[2], 16, 16), (tiny.PROMPTS[3], 16, 24)]
    )
]


@pytest.mark.slow
def test_several_sizes_are_captured_weighed_and_replayed(tmp_path):
    pipe = tiny.load()
    calls = capture(pipe, SIZES, FLUX_CALL, tmp_path, held=[(row("a", height=24), 7)])
    shapes = [tuple(kwargs["hidden_states"].shape[:2]) for kwargs in inputs_of(calls)]
    assert shapes == [(2, 16)] * STEPS + [(1, 32)] * STEPS + [(1, 24)] * STEPS + [(1, 24)] * STEPS
    assert calls.counts == (3 * STEPS, STEPS)
    replays_to_the_bit(pipe.transformer, calls)
    call = {**FLUX_CALL, "num_inference_steps": STEPS}
    weights = noise_level_weights(pipe, ["transformer"], SIZES, call, range(STEPS))
    assert sum(weights.values()) == pytest.approx(STEPS) and min(weights.values()) > 0


def test_a_limit_counts_the_batches_that_sizes_make(tmp_path):
    """Four rows are three batches of two steps: half of these six calls are kept, both steps among them."""
    calls = capture(tiny.load(), SIZES, FLUX_CALL, tmp_path, most=3)
    assert [call.step for call in calls.calls] == [0, 1, 0]


def test_a_row_s_noise_is_its_own_whatever_shares_its_call(folder):
    pipe = tiny.load(dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    call = {**FLUX_CALL, "num_inference_steps": 1}
    alone = [latents for item in SIZES for _, latents in run_pipeline(pipe, [item], call)]
    together = [latent[None] for _, latents in run_pipeline(pipe, SIZES, call) for latent in latents]
    for one, two in zip(alone, (together[i] for i in (0, 2, 1, 3)), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


# A whole job


def prepared(folder: Path, rows: list, recipe: str, output: Path, **options) -> making.Job:
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = making.JobOptions(
        model="tiny", recipe=recipe, prompts=str(folder / "p.jsonl"), output=str(output), overwrite=True, **options
    )
    return making.job_of(asked)


def test_a_job_refuses_columns_before_anything_is_computed(folder, quick_recipe, monkeypatch):
    monkeypatch.setattr("fluxq.jobs.job.load_pipeline", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=r"column 'image' is the argument image, which FluxPipeline does not take"):
        prepared(folder, [{"prompt": "a", "image": "one.png"}], str(quick_recipe("nvfp4")), folder / "out")


@pytest.mark.slow
def test_a_job_with_sizes_is_calibrated_checked_and_says_so(folder, quick_recipe):
    rows = [{"prompt": p, "height": h} for p, h in zip(tiny.PROMPTS[:4], (16, 24, 16, 24), strict=True)]
    recipe = str(quick_recipe("nvfp4", fitted=False))
    job = prepared(folder, rows, recipe, folder / "out", call={"num_inference_steps": 2})
    record = making.quantize(job)
    assert record.check.finite and record.check.images == 4
    assert [item[2] for item in record.trajectory["items"]] == [{"height": row["height"]} for row in rows * 2]
    assert prepared(folder, rows, recipe, folder / "out").identity != job.identity  # two steps, not eight
    other = prepared(folder, [*rows[:3], {**rows[3], "height": 16}], recipe, folder / "out")
    assert other.identity["prompts"] != job.identity["prompts"]
