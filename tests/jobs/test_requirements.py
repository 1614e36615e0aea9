"""Tests of what a job needs of a pipeline, told from its class and configuration, before anything is loaded."""

import inspect
import json
import re
from pathlib import Path

import diffusers
import pytest

from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.jobs.requirements import (
    BINNED,
    _fits,
    call_of,
    default_frames,
    makes_pictures,
    makes_video,
    require_call,
    require_pictures,
    require_prompts_suffice,
    require_steps,
)


@pytest.fixture
def folder(tmp_path):
    """folder("WanPipeline", sample_size=8) is a model folder as far as requirements look at it."""

    def make(pipeline: str, scheduler: bool = True, **transformer) -> ModelFolder:
        index = {"_class_name": pipeline, "transformer": ["diffusers", "FluxTransformer2DModel"]}
        index |= {"scheduler": ["diffusers", "DDIMScheduler"]} if scheduler else {}
        (tmp_path / "transformer").mkdir(exist_ok=True)
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        (tmp_path / "transformer" / "config.json").write_text(json.dumps(transformer))
        return ModelFolder("model", tmp_path)

    return make


@pytest.mark.parametrize(
    ("pipeline", "video", "frames"),
    [
        ("FluxPipeline", False, None),
        ("Kandinsky5T2IPipeline", False, None),  # whose output is called `image`
        ("WanPipeline", True, 81),
        ("LTXPipeline", True, 161),
        ("HunyuanVideoPipeline", True, 129),
        ("LTX2Pipeline", True, None),  # and sound, which nobody compares
        ("SanaVideoPipeline", True, 81),  # which calls them `frames`
    ],
)
def test_what_is_compared(folder, pipeline, video, frames):
    model = folder(pipeline)
    require_pictures(model, "cure")
    assert makes_pictures(model) and makes_video(model) == video and default_frames(model) == frames


@pytest.mark.parametrize(
    ("pipeline", "made"),
    [("StableAudio3Pipeline", "audios"), ("LLaDA2Pipeline", "sequences, texts"), ("MusicLDMPipeline", "audios")],
)
def test_what_makes_neither_images_nor_video_is_refused_by_name_with_the_cure(folder, pipeline, made):
    message = f"model: a {pipeline} makes {made}, and only images and video can be compared; pass --no-check"
    with pytest.raises(ValueError, match=re.escape(message)):
        require_pictures(folder(pipeline), "pass --no-check")


def test_a_class_that_diffusers_does_not_have_is_refused_elsewhere(folder):
    model = folder("OwnPipeline")
    require_pictures(model, "cure")
    assert not makes_video(model) and call_of(model, {"a": 1}, {"b": 2}) == {"a": 1, "b": 2}


def test_frames_are_called_as_the_pipeline_calls_them(folder):
    assert call_of(folder("WanPipeline"), {}, {}) == {"num_frames": 81}
    assert call_of(folder("WanPipeline"), {}, {}, 25) == {"num_frames": 25}
    assert call_of(folder("WanPipeline"), {"num_frames": 49}, {}, 25) == {"num_frames": 49}
    assert call_of(folder("WanPipeline"), {"num_frames": 49}, {"num_frames": 5}, 25) == {"num_frames": 5}
    assert call_of(folder("MochiPipeline"), {}, {}, 25) == {"num_frames": 19}  # fewer by itself
    assert (
        call_of(folder("LTX2Pipeline"), {}, {}) == {} and call_of(folder("LTX2Pipeline"), {}, {}, 9)["num_frames"] == 9
    )
    call = call_of(folder("SanaVideoPipeline", sample_size=30), {}, {"num_frames": 17})
    assert call == {"frames": 17}
    assert call_of(folder("FluxPipeline"), {}, {}, 25) == {}


def test_frames_are_not_asked_of_images(folder):
    model = folder("FluxPipeline")
    with pytest.raises(ValueError, match="a FluxPipeline makes images, which have no frames: leave out --frames"):
        require_call(model, call_of(model, {}, {"num_frames": 5}))


def test_a_pipeline_of_a_newer_diffusers_asks_for_it(folder):
    with pytest.raises(ValueError, match=r"NextPipeline, which this diffusers \(.*\) does not have: update diffusers"):
        require_call(folder("NextPipeline"), {})


def test_a_size_without_a_table_of_resolutions_is_made_as_it_is(folder):
    model = folder("PixArtSigmaPipeline", sample_size=8)
    assert call_of(model, {}, {}) == {"use_resolution_binning": False}
    assert call_of(model, {"use_resolution_binning": True}, {}) == {"use_resolution_binning": True}
    assert call_of(folder("PixArtSigmaPipeline", sample_size=128), {}, {}) == {}


@pytest.mark.parametrize("pipeline", BINNED)
def test_tables_of_resolutions_are_those_of_diffusers(pipeline):
    source = inspect.getsource(inspect.unwrap(getattr(diffusers, pipeline).__call__))
    checked = source.partition("if use_resolution_binning:")[2].partition("classify_height_width_bin")[0]
    assert sorted(map(int, re.findall(r"sample_size == (\d+)", checked))) == sorted(BINNED[pipeline])


@pytest.mark.slow  # reads all of diffusers' pipelines
def test_every_pipeline_that_refuses_a_size_is_in_the_table():
    root = Path(inspect.getfile(diffusers)).parent / "pipelines"
    texts = (path.read_text(encoding="utf-8") for path in root.rglob("pipeline_*.py"))
    refusing = [text for text in texts if 'raise ValueError("Invalid sample size")' in text]
    classes = {name for text in refusing for name in re.findall(r"^class (\w+Pipeline)\(", text, re.MULTILINE)}
    assert classes == set(BINNED)


def test_steps_are_told_by_the_pipeline_or_its_scheduler(folder):
    require_steps(folder("FluxPipeline", scheduler=False))
    require_steps(folder("PixArtSigmaPipeline"))
    require_steps(folder("HunyuanVideo15Pipeline"))
    with pytest.raises(
        ValueError, match=r"PixArtSigmaPipeline takes no callback_on_step_end .*--profile rtn --no-check"
    ):
        require_steps(folder("PixArtSigmaPipeline", scheduler=False))


def test_what_needs_more_than_a_prompt_is_refused_by_name(folder):
    model = folder("WanImageToVideoPipeline")
    with pytest.raises(ValueError, match="a WanImageToVideoPipeline needs image beside a prompt"):
        require_prompts_suffice(model, {})
    require_prompts_suffice(model, {"image": "x"})
    require_prompts_suffice(folder("FluxPipeline"), {})


def test_a_tuple_of_one_type_has_any_length() -> None:
    """FLUX.2's call says tuple[int] of three numbers."""
    assert _fits([10, 20, 30], tuple[int]) and _fits([1, 2], tuple[int, int])
    assert not _fits([1, 2, 3], tuple[int, int]) and not _fits(["1"], tuple[int])
    assert _fits([725, 0.03], list[int]) and not _fits(0.03, int)


def test_packages_that_a_tokenizer_is_read_by_are_named(tiny_folder, monkeypatch):
    """Without them transformers takes the file for another kind, and asks for a package of that."""
    file = tiny_folder / "tokenizer_2" / "spiece.model"
    file.with_name("tokenizer.json").rename(file)
    monkeypatch.setattr("transformers.utils.is_sentencepiece_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"tokenizer_2/spiece\.model: .*pip install sentencepiece protobuf"):
        load_pipeline(resolve_model(str(tiny_folder)))


def test_a_list_of_numbers_in_the_index_is_a_setting_and_no_component(tiny_folder):
    index = tiny_folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "text_encoder_select_layers": [2, 5]}))
    assert resolve_model(str(tiny_folder)).components == resolve_model("tiny").components
