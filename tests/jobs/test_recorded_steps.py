"""A recipe's `steps: {compute: …}`: the list that a checkpoint records, who uses it by itself, and what is refused."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from family_pipelines import wan_2

import fluxq
from fluxq import tiny
from fluxq.base.files import read_json, write_json
from fluxq.eval.images.sides import Side
from fluxq.eval.report.card import model_card
from fluxq.jobs import judge, listing, making
from fluxq.jobs.exchange import plan_export
from fluxq.jobs.job import JobOptions
from fluxq.jobs.planning import demand
from fluxq.jobs.stepping import export_list
from fluxq.kernels.linear import quant_layers
from fluxq.quantize.record import read_record
from fluxq.recipes.computing import QuantizationConfig, Steps
from fluxq.recipes.recipe import load_recipe
from fluxq.recipes.step_exports import read_mask
from fluxq.runtime import step_trials, steps
from fluxq.runtime.skip import recorded_lists, skip_steps

CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 8}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("recorded")
    (root / "half.yaml").write_text("extends: fp8\nsteps: {compute: 0.5, first: 2, last: 2}\n")
    return root


def options(root: Path, recipe: str = "half.yaml", output: str = "out", **how: Any) -> JobOptions:
    return JobOptions(model="tiny", recipe=str(root / recipe), output=str(root / output), device="cpu", **how)


@pytest.fixture(scope="module")
def folder(root) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "IMAGES", 4)
        making.quantize(making.job_of(options(root)))
    return root / "out"


def recorded(folder: Path) -> dict[str, Any]:
    return read_json(folder / "transformer" / "config.json")["quantization_config"]


def run(pipe: Any, **how: Any) -> torch.Tensor:
    with torch.no_grad():
        noise = torch.Generator().manual_seed(0)
        return pipe("a red circle", generator=noise, output_type="latent", **CALL | how).images


# --- what is recorded


def test_the_list_is_made_with_the_16_bit_pipeline(root, monkeypatch) -> None:
    seen = []

    def noted(job, pipe, work):
        seen.append(quant_layers(pipe.transformer))
        raise RuntimeError("enough")

    monkeypatch.setattr(making, "list_of_recipe", noted)
    with pytest.raises(RuntimeError, match="enough"):
        making.quantize(making.job_of(options(root, output="other", profile="rtn", check=False)))
    assert seen == [[]]


def test_a_checkpoint_records_a_list_of_the_recipes_share_with_the_kept_steps_in_it(folder) -> None:
    said = recorded(folder)
    assert said["steps"] == {"first": 2, "last": 2, "components": "16bit"}
    ((number, steps),) = QuantizationConfig.from_dict(said).step_lists.items()
    assert number == steps.total == 8 and steps.computed == (0, 1, 6, 7)
    assert [*said["runtime"]["steps"]] == ["8"] and steps.models.keys() == {"transformer"}
    record = read_record(folder)
    assert record.recipe.steps == {"first": 2, "last": 2, "components": "16bit", "compute": 0.5}
    assert record.check is not None and record.check.listed == str(steps)
    card = (folder / "README.md").read_text()
    assert "\nfluxq.keep_steps(pipe)\nfluxq.skip_steps(pipe)\n```" in card
    assert "- computed: 50% of the steps of a call, by `fluxq.skip_steps(pipe)`" in card
    assert f"4 images of {steps}, same prompts" in card


def test_the_list_of_a_checkpoint_is_exported(folder, root) -> None:
    place = export_list(folder, "cache-dit", root / "mask.yaml")
    assert read_mask(place) == (1, 1, 0, 0, 0, 0, 1, 1)
    with pytest.raises(ValueError, match=r"records 0 lists of steps: give the file of one"):
        export_list(Path(tiny.path()), "cache-dit", root / "none.yaml")


def test_saving_again_keeps_the_list_and_what_another_program_wrote_beside_it(folder, tmp_path) -> None:
    pipe = tiny.load(folder=folder)
    pipe.transformer.config.quantization_config._runtime |= {"elsewhere": [1]}
    pipe.save_pretrained(tmp_path / "again")
    assert recorded(tmp_path / "again")["runtime"] == recorded(folder)["runtime"] | {"elsewhere": [1]}
    assert recorded_lists(tiny.load(folder=tmp_path / "again").transformer) == recorded_lists(pipe.transformer)


@pytest.mark.slow
def test_an_interrupted_list_goes_on_and_the_checkpoint_is_the_same(root, folder, monkeypatch) -> None:
    monkeypatch.setattr(listing, "IMAGES", 4)
    measured, measure, ran = [], listing.measure_velocities, step_trials.Trials._squares
    monkeypatch.setattr(listing, "measure_velocities", lambda *args: (measured.append(1), measure(*args))[1])

    def broken(self: Any, steps: Any) -> Any:
        if steps.order == 1 and len(measured) < 2:
            measured.append(2)
            raise KeyboardInterrupt
        return ran(self, steps)

    monkeypatch.setattr(step_trials.Trials, "_squares", broken)
    for _ in range(2):
        job = making.job_of(options(root, output="again", check=False))
        try:
            making.quantize(job)
        except KeyboardInterrupt:
            assert not (root / "again").exists()
    assert measured == [1, 2] and recorded(root / "again") == recorded(folder)


@pytest.mark.slow
def test_within_a_bound_of_memory_list_and_check_are_the_same(root, folder, monkeypatch) -> None:
    monkeypatch.setattr(listing, "IMAGES", 4)
    made = making.quantize(making.job_of(options(root, output="bound", max_memory=70 << 20)))
    assert recorded(root / "bound") == recorded(folder)
    assert made.check == read_record(folder).check


def test_a_list_is_within_the_bound_of_memory_where_nothing_else_runs(root) -> None:
    (root / "alone.yaml").write_text("extends: fp8\nsteps: {compute: 0.5}\n")
    how = {"recipe": "alone.yaml", "output": "alone", "profile": "rtn", "check": False}
    with pytest.raises(ValueError, match="--max-memory 977KiB: running transformer on 12 images of 16x16 needs"):
        making.job_of(options(root, max_memory=10**6, **how))
    job = making.job_of(options(root, max_memory=70 << 20, **how))
    assert job.run.memory is not None and job.run.memory.demand.working["transformer"] > 0
    assert (
        demand(replace(job, plans=tuple(replace(plan, compute=None) for plan in job.plans)), "cpu", writes=True) is None
    )


@pytest.mark.slow
def test_two_denoisers_record_the_list_of_their_pipeline(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(listing, "IMAGES", 4)
    torch.manual_seed(0)
    pipe, call = wan_2()
    pipe.save_pretrained(tmp_path / "model")
    write_json(tmp_path / "model" / "fluxq_generation.json", {**call, "num_inference_steps": 8})
    (tmp_path / "half.yaml").write_text("extends: fp8\nsteps: {compute: 0.5}\n")
    job = making.job_of(replace(options(tmp_path, check=False), model=str(tmp_path / "model")))
    making.quantize(job)
    lists = [read_json(tmp_path / "out" / name / "config.json") for name in ("transformer", "transformer_2")]
    one, other = (each["quantization_config"]["runtime"] for each in lists)
    assert one == other and one["steps"]["8"]["models"].keys() == {"transformer", "transformer_2"}
    loaded = diffusers.WanPipeline.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    with skip_steps(loaded) as skipped:
        loaded("a", output_type="latent", **{**call, "num_inference_steps": 8})
    assert 0 < skipped.computed < skipped.calls
    loaded.transformer_2.config.quantization_config._runtime = {"steps": {}}
    skip_steps(loaded).remove()
    fewer = dict(one["steps"]["8"], compute=[0, 7], fitted=[])
    loaded.transformer_2.config.quantization_config._runtime = {"steps": {"8": fewer}}
    with pytest.raises(ValueError, match=r"of checkpoints with different lists of steps: give one as steps="):
        skip_steps(loaded)


# --- who uses it


@pytest.mark.slow
def test_a_pipeline_uses_it_once_told_and_says_so_when_it_is_loaded(folder, caplog) -> None:
    steps._tell_once.cache_clear()
    with caplog.at_level(logging.WARNING, "fluxq"):
        pipe = tiny.load(folder=folder)
        tiny.load(folder=folder)
    said = [each for each in caplog.messages if "skip_steps" in each]
    assert len(said) == 1 and "has a list of steps (4 of 8 steps computed, order" in said[0]
    calls: list[int] = []
    pipe.transformer.transformer_blocks[0].register_forward_hook(lambda *_: calls.append(1))
    run(pipe)
    assert len(calls) == 8
    with fluxq.skip_steps(pipe) as skipped:
        run(pipe)
    assert len(calls) == 8 + 4 and [skipped.steps] == recorded_lists(pipe.transformer)


@pytest.mark.slow
def test_of_several_lists_that_of_the_nearest_number_of_steps_is_taken(folder) -> None:
    pipe = tiny.load(folder=folder)
    with skip_steps(pipe, [0, 2, 3]) as short:
        few = short.steps
    said = pipe.transformer.config.quantization_config
    said._runtime = {"steps": {"4": few.to_dict(), **said._runtime["steps"]}}
    with skip_steps(pipe) as skipped:
        for total, own in ((4, 4), (5, 4), (8, 8), (11, 8)):
            run(pipe, num_inference_steps=total)
            assert skipped.steps.total == own


@pytest.mark.slow
def test_a_side_of_an_evaluation_uses_it_but_not_to_look_at_layers(folder) -> None:
    side, counts = Side("half", str(folder), "digest"), []
    for skips in (True, False):
        pipe = side.open(skips=skips)
        pipe.transformer.transformer_blocks[0].register_forward_hook(lambda *_: counts.append(1))
        run(pipe)
    assert len(counts) == 4 + 8


def test_other_programs_files_do_not_hold_it_and_export_says_so(folder, tmp_path) -> None:
    done = plan_export(str(folder), "comfy", tmp_path / "out.safetensors", requantize=True).write()
    assert done.notes["every step is computed there, here some are skipped by the checkpoint's list"]


@pytest.mark.slow
def test_eval_and_bench_say_that_they_use_it(folder) -> None:
    subject = judge.subject_of(folder, judge.JudgeOptions(count=4, metrics=("psnr",), backends=("native",)))
    (said,) = map(str, recorded_lists(tiny.load(folder=folder).transformer))
    report = judge.evaluate(subject)
    assert report is not None and [run.provenance["steps"] for run in report.runs] == [said]
    assert f"\n- {said}\n" in (folder / "eval" / "report.md").read_text()
    speed = judge.bench(subject, rounds=3, warmup=1)
    assert speed.conditions["steps"] == said


@pytest.mark.slow
def test_a_report_says_what_becomes_of_the_list_in_a_call_of_another_number_of_steps(folder) -> None:
    (said,) = map(str, recorded_lists(tiny.load(folder=folder).transformer))
    for total, words in ((8, said), (20, f"{said}; here of 20, those of the nearest noise levels")):
        subject = judge.subject_of(folder, judge.JudgeOptions(count=4, call={"num_inference_steps": total}))
        assert judge._listed(subject) == {"steps": words}


def test_the_card_of_a_quantized_text_encoder_has_nothing_of_steps(root, folder) -> None:
    record = read_record(folder)
    (part,) = record.components
    card = model_card(record.model_copy(update={"components": [part.model_copy(update={"family": "clip"})]}))
    assert "skip_steps" in model_card(record) and "_steps" not in card


# --- what is refused


def test_a_pipeline_without_a_list_is_refused_with_the_cure(plain_checkpoint) -> None:
    with pytest.raises(ValueError, match=r"checkpoint has no list of steps: give one .*`steps: {compute: 0.5}`"):
        skip_steps(tiny.load(folder=plain_checkpoint("fp8")))
    with pytest.raises(ValueError, match=r"steps= is a list, and compute= makes another"):
        skip_steps(tiny.load(), [0, 1], compute=0.5)


def test_a_damaged_list_is_refused_by_its_file(folder, tmp_path) -> None:
    said = json.loads(json.dumps(recorded(folder)))
    said["runtime"]["steps"]["8"]["compute"] = [0, 9]
    config = read_json(folder / "transformer" / "config.json")
    copied = tmp_path / "damaged"
    copied.mkdir()
    for part in folder.iterdir():
        if part.name != "transformer":
            (copied / part.name).symlink_to(part)
    (copied / "transformer").mkdir()
    for file in (folder / "transformer").glob("*.safetensors"):
        (copied / "transformer" / file.name).symlink_to(file)
    write_json(copied / "transformer" / "config.json", {**config, "quantization_config": said})
    with pytest.raises(ValueError, match=r"runtime in config.json is damaged .*the last step, 0 and 7.*remove"):
        tiny.load(folder=copied)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("{compute: 0}", "greater than 0"),
        ("{compute: 1.5}", "less than or equal to 1"),
        ("{compute: yes}", "valid number"),
        ("{first: 0}", r"neither .first. nor .last. names a step to keep, nor does .compute. say"),
        ("{first: 1, of: 8}", "`of` says of how many steps `compute` is a share"),
        ("{compute: 0.3, first: 1, last: 3}", r"computes 2 of the 8 steps of a call, and 4 have to be"),
    ],
)
def test_a_share_that_cannot_be_is_refused_before_anything_is_read(root, tmp_path, steps, message) -> None:
    (tmp_path / "bad.yaml").write_text(f"extends: fp8\nsteps: {steps}\n")
    with pytest.raises(ValueError, match=message):
        making.job_of(options(tmp_path, "bad.yaml"), writes=False, runs=False)


def test_a_recipe_may_say_of_how_many_steps_its_share_is(tmp_path) -> None:
    (tmp_path / "of.yaml").write_text("extends: fp8\nsteps: {compute: 0.5, of: 6}\n")
    job = making.job_of(options(tmp_path, "of.yaml"), writes=False, runs=False)
    assert job.call["num_inference_steps"] == job.check_call["num_inference_steps"] == 6
    same = replace(job.options, call={"num_inference_steps": 6})
    assert making.job_of(same, writes=False, runs=False).call == job.call
    with pytest.raises(ValueError, match=r"recipe of computes 0.5 of 6 steps, and this call has 8: leave out --num-"):
        making.job_of(replace(job.options, call={"num_inference_steps": 8}), writes=False, runs=False)
    assert Steps(compute=0.5, of=6).kept is None and Steps(first=1, compute=0.5, of=6).kept == Steps(first=1)


def test_a_share_alone_keeps_no_steps(tmp_path) -> None:
    (tmp_path / "half.yaml").write_text("extends: fp8\nsteps: {compute: 0.5}\n")
    chosen = load_recipe(str(tmp_path / "half.yaml"))[1].steps
    assert chosen is not None and chosen == Steps(compute=0.5)
    assert [chosen.kept, Steps(compute=0.5, last=2).kept] == [None, Steps(last=2)]
    plan = making.job_of(options(tmp_path), writes=False, runs=False).plans[0]
    assert (plan.steps, plan.compute) == (None, 0.5)
    assert "steps" not in QuantizationConfig.of(plan.schemes(), steps=plan.steps).to_dict()


def test_loading_by_a_recipe_with_a_share_says_what_makes_the_list(tmp_path, tiny_folder, caplog) -> None:
    (tmp_path / "half.yaml").write_text("extends: fp8\nsteps: {compute: 0.5}\n")
    how = fluxq.FluxqConfig(recipe=str(tmp_path / "half.yaml"))
    with caplog.at_level(logging.WARNING, "fluxq"):
        model = diffusers.FluxTransformer2DModel.from_pretrained(
            tiny_folder, subfolder="transformer", quantization_config=how, dtype=torch.bfloat16
        )
    assert "`fluxq.skip_steps(pipe, compute=0.5)` makes it once the pipeline is loaded" in caplog.text
    assert "runtime" not in model.config["quantization_config"].to_dict()
