"""Files as strangers may make them, given to fluxq's readers in a process of its own, which `python hostile.py` is.

    python tests/hostile.py FOLDER SEED TARGET=COUNT…

FOLDER holds what is damaged: `model` (a pipeline), `quantized` (a checkpoint of fluxq), `families` (a folder with
configurations of each), `work` and `begun` (what interrupted runs leave), `prompts` (a file of each kind), `exchange`
(models in the layouts of other programs), `lora.safetensors`, `statistics.safetensors`, `recipe.yaml` and
`report.json`. Of every target the file is changed COUNT times, always the same way for one SEED, and read as a user
would have it read. Printed is JSON: {"cases", "refused", "faults"}. A fault is an error that is no ValueError and no
OSError or names no file, more than 2 seconds or 1 GB for one file, and a file opened outside the folder.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import fluxq

PACKAGE = Path(fluxq.__file__).parent
SECONDS, BYTES = 2, 1 << 30
MARK = "\N{SNOWMAN}"  # what a fragment takes the place of; no file of ours holds one
FRAGMENTS = (
    *("null", "true", "0", "1", "-1", "1.5", "NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "100000000000"),
    *(str(2**power + more) for power in (31, 32, 53, 63, 64) for more in (-1, 0)),
    *("[]", "{}", "[[]]", "[null]", '{"": 0}', "[-1]", "[1e999]", "[" * 100_000 + "]" * 100_000, '{"a":' * 5000),
    *('""', '"a"', '"\\u0000"', '"\\ud800"', '"' + "x" * 100_000 + '"', '"/etc/passwd"', '"../outside.safetensors"'),
    *('"link.safetensors"', '"."', '".."', '"\\n"', '"**"', '"F64"', '"BOOL"', '"16bit"', '"fp8-fp8-r999999"'),
)
YAML_FRAGMENTS = (
    *("&a [*a]", "!!python/object/apply:os.system [id]", "!!binary a", "!!set {}", "!!int x", "2001-99-99", "? [x]"),
    *("0x" + "f" * 5000, "1" + ":59" * 3000, "<<: {}", "- " * 9999, "%", "!", "\x00", ".inf", "../recipe.yaml", "~"),
    '"' + "**.a." * 200 + 'x"',
)


class Target(NamedTuple):
    """A file below FOLDER, what reads it, what takes the place of its values, and whether a library reads it first."""

    file: str
    read: Callable[[Path], Any]
    fragments: tuple[str, ...] = FRAGMENTS
    by_library: bool = False


def changed(value: Any, chance: random.Random, fragments: tuple[str, ...]) -> str:
    """The JSON text of `value` with one to three faults, each anywhere in it."""
    value = json.loads(json.dumps(value))
    inserted = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if not value:
            break
        holder, key = _place(value, chance)
        what = chance.randrange(5)
        if what == 0 and isinstance(holder, dict):
            other = chance.choice(list(holder))
            holder[other] = holder.pop(key)  # in another's place, or at the end
        elif what == 1:
            del holder[key]
        elif what == 2 and isinstance(holder, dict):
            holder[f"{MARK}{len(inserted)}{MARK}"] = holder[key]  # a key given twice, or one that is no key
            inserted.append(json.dumps(key) if chance.random() < 0.5 else '"\\ud800"')
        else:
            holder[key] = f"{MARK}{len(inserted)}{MARK}"
            inserted.append(chance.choice(fragments))
    text = json.dumps(value)
    for number, fragment in enumerate(inserted):
        text = text.replace(json.dumps(f"{MARK}{number}{MARK}"), fragment)
    return text


def garbled(data: bytes, chance: random.Random) -> bytes:
    """Bytes with some flipped, cut off, doubled or put in."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(found) + 1)
        what = chance.randrange(4)
        if what == 0 and at < len(found):
            found[at] ^= 1 << chance.randrange(8)
        elif what == 1:
            del found[at : at + chance.choice((1, 2, 100, len(found)))]
        elif what == 2:
            found[at:at] = found[at : at + chance.choice((1, 10, 1000))]
        else:
            found[at:at] = chance.choice((b"\x00", b"\xff", b"\xed\xa0\x80", b'"', b"[", b"}", b",", b"1e9999"))
    return bytes(found)


def _place(value: Any, chance: random.Random) -> tuple[Any, Any]:
    """(holder, key) of something inside a JSON value; as often near its root as in its leaves."""
    while True:
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        inner = value[key]
        if not inner or not isinstance(inner, (dict, list)) or chance.random() < 0.3:
            return value, key
        value = inner


def write_damaged(file: Path, original: Path, target: Target, chance: random.Random) -> None:
    """Write `original` to `file` with a fault; the data of a safetensors file become zeros, which take no disk."""
    data = original.read_bytes()
    if file.suffix != ".safetensors":
        file.write_bytes(_damaged(data, file.suffix, target, chance))
        return
    length = int.from_bytes(data[:8], "little")
    size = len(data) - 8 - length
    header = _damaged(data[8 : 8 + length], ".json", target, chance)
    said = len(header) if chance.random() < 0.9 else chance.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(header) - 1))
    with file.open("wb") as stream:
        stream.write(max(0, said).to_bytes(8, "little") + header)
        stream.truncate(stream.tell() + max(0, size + chance.choice((0, 0, 0, 0, -1, 1, 4096, -size))))


def _damaged(text: bytes, kind: str, target: Target, chance: random.Random) -> bytes:
    if kind in (".txt", ".csv", ".tsv", ".parquet", ".gguf") or chance.random() < 0.25:
        return garbled(text, chance)
    if kind == ".jsonl":
        lines = text.splitlines()
        at = chance.randrange(len(lines))
        lines[at] = _damaged(lines[at], ".json", target, chance)
        return b"\n".join(lines)
    if kind != ".yaml":
        return _value_changed(json.loads(text), chance, target.fragments).encode()
    import yaml

    return changed(yaml.safe_load(text), chance, target.fragments).encode()


def _value_changed(value: Any, chance: random.Random, fragments: tuple[str, ...]) -> str:
    """As `changed`; where a header's metadata holds JSON in text, the fault may be in there."""
    metadata = value.get("__metadata__", {}) if isinstance(value, dict) else {}
    nested = [key for key, text in metadata.items() if text.startswith("{")]
    if nested and chance.random() < 0.7:
        key = chance.choice(nested)
        value["__metadata__"][key] = changed(json.loads(value["__metadata__"][key]), chance, fragments)
        return json.dumps(value)
    return changed(value, chance, fragments)


# --- what reads them


def read_weights(folder: Path) -> None:
    from fluxq.base.model import check_weights, resolve_model
    from fluxq.quantize.checkpoint import SourceWeights

    model = resolve_model(str(folder / "model"), local_files_only=True)
    check_weights(model)
    weights = SourceWeights(model, "transformer")
    for name in weights.names:
        _ = weights[name]


def read_config(folder: Path) -> None:
    from fluxq.base.model import resolve_model
    from fluxq.quantize.checkpoint import model_on_meta

    model = resolve_model(str(folder / "model"), local_files_only=True)
    for component in ("transformer", "text_encoder_2"):
        model_on_meta(model, component)


def read_quantized_config(folder: Path) -> None:
    from fluxq.base.model import resolve_model
    from fluxq.quantize.checkpoint import quantized_on_meta

    quantized_on_meta(resolve_model(str(folder / "quantized"), local_files_only=True), "transformer")


def verify_checkpoint(folder: Path) -> None:
    from fluxq.quantize.verify import verify

    verify(folder / "quantized")


def read_subject(folder: Path) -> None:
    from fluxq.jobs import judge
    from fluxq.quantize import record

    record.is_as_written = lambda _: True  # the readers behind it have to stand damage too
    judge.subject_of(folder / "quantized", judge.JudgeOptions(model=str(folder / "model"), local_files_only=True))


def load_checkpoint(folder: Path) -> None:
    import torch
    from diffusers import FluxTransformer2DModel

    component = folder / "quantized" / "transformer"
    FluxTransformer2DModel.from_pretrained(component, dtype=torch.bfloat16, local_files_only=True)


def read_lora(folder: Path) -> None:
    from fluxq.base.model import resolve_model
    from fluxq.quantize.lora import LoraFile, read_updates

    model = resolve_model(str(folder / "model"), local_files_only=True)
    read_updates(LoraFile.parse(f"{folder / 'lora.safetensors'}:0.5"), model, "transformer")


def read_statistics(folder: Path) -> None:
    from fluxq.calibrate.statistics import Statistics

    statistics = Statistics.load(folder / "statistics.safetensors")
    for group in statistics.groups:
        statistics.amax(group)
    statistics.merge(statistics)


def read_recipe(folder: Path) -> None:
    from fluxq.recipes.all_families import family_of
    from fluxq.recipes.plan import LinearShape, component_recipe, make_plan
    from fluxq.recipes.recipe import load_recipe

    _, recipe = load_recipe(str(folder / "recipe.yaml"))
    class_name = "FluxTransformer2DModel"
    family = family_of(class_name)
    linears = [LinearShape("transformer_blocks.0.attn.to_q", 128, 128), LinearShape("proj_out", 64, 128)]
    for component in recipe.components:
        entry = component_recipe(recipe, component, family)
        how = {"static_inputs": False, "profile": recipe.profile, "compat": recipe.compat}
        with suppress(ValueError):  # names the pattern, layer or role that this model does not go with
            make_plan(family, class_name, entry, linears, **how)


def read_report(folder: Path) -> None:
    from fluxq.eval.metrics import schema

    schema.read_report(folder / "report.json")


def read_generation(folder: Path) -> None:
    from fluxq.base.model import resolve_model
    from fluxq.calibrate.capture import images_per_batch
    from fluxq.jobs.requirements import require_call

    model = resolve_model(str(folder / "model"), local_files_only=True)
    call = model.generation_defaults
    require_call(model, call)
    images_per_batch(call)


def load_model(folder: Path) -> None:
    from fluxq.base.model import load_pipeline, resolve_model

    load_pipeline(resolve_model(str(folder / "model"), local_files_only=True))


def config_of(family: str) -> Callable[[Path], None]:
    """A reader of configurations of that family."""

    def read(folder: Path) -> None:
        from fluxq.base.model import resolve_model
        from fluxq.quantize.checkpoint import model_on_meta

        model = resolve_model(str(folder / "families" / family), local_files_only=True)
        for component in model.components:
            model_on_meta(model, component)

    return read


def read_block(folder: Path) -> None:
    from types import SimpleNamespace
    from typing import Any, cast

    from fluxq.quantize.run import Outcome, is_finished, layer_tensors

    file = folder / "work" / "0000.safetensors"
    if not is_finished(
        file, cast(Any, SimpleNamespace(differing=lambda _: []))
    ):  # which is made again, and says why in the log
        Outcome.read([file])
    layer_tensors(file, list(Outcome.read([file]).schemes))


def unsealed(file: Path) -> dict:
    """The content of a file, whole or damaged: the readers behind the hash have to stand that too."""
    from fluxq.base.files import read_json

    said = read_json(file)
    said.pop("sha256", None)
    return said


def read_calls(folder: Path) -> None:
    import torch

    from fluxq.calibrate import calls, nested

    cpu = torch.device("cpu")
    calls.read_sealed_json = unsealed
    stem = folder / "work" / "calls" / "batch-0000"
    for call in calls._read([stem], ["transformer"], {}, 0)["transformer"].calls:
        call.load(cpu)
        for layout in call.outputs.values():
            nested.unpack(layout, nested.blank(cpu))


def read_outputs(folder: Path) -> None:
    import torch

    from fluxq.calibrate.blocks import _Outputs

    kept = _Outputs(folder / "work" / "outputs", "whose they are", 1)
    if not kept.has(0):
        kept.load(0, 0, torch.device("cpu"))


def read_levels(folder: Path) -> None:
    from types import SimpleNamespace
    from typing import cast

    from fluxq.base.ranks import ALONE
    from fluxq.jobs import making

    class Damaged(ValueError):
        """It would be measured again."""

    def measured(*_: object) -> dict[int, float]:
        raise Damaged("levels.json: measured again")

    run = SimpleNamespace(ranks=ALONE)
    job, making.noise_level_weights = cast(Any, SimpleNamespace(run=run, call={})), measured
    making.read_sealed_json = unsealed
    making._level_weights(job, None, [], {}, folder / "work" / "levels.json")


def read_job(folder: Path) -> None:
    from types import SimpleNamespace
    from typing import cast

    from fluxq.jobs.job import _begin

    output = folder / "begun" / "out"
    options = SimpleNamespace(overwrite=False, parallel_blocks=False)
    prepared = cast(Any, SimpleNamespace(output=output, identity={"model": {"transformer": "a"}}, options=options))
    try:
        _begin(prepared, output.parent / "its own")
    except ValueError as error:
        if "an interrupted run that differs in" not in str(error):  # the answer to a sound one
            raise


def prompts_in(suffix: str) -> Callable[[Path], None]:
    """A reader of prompt files of that kind."""

    def read(folder: Path) -> None:
        import diffusers

        from fluxq.base.model import ModelFolder
        from fluxq.calibrate.prompts import load_prompts

        pipeline = diffusers.FluxKontextPipeline
        load_prompts(str(folder / "prompts" / f"p{suffix}"), ModelFolder("m", folder / "model"), pipeline=pipeline)

    return read


def inspected(name: str) -> Callable[[Path], None]:
    """A reader of that file or folder of another program; what is wrong with a layer counts as refused."""

    def read(folder: Path) -> None:
        from fluxq.quantize.exchange.inspect import inspect_path

        for report in inspect_path(folder / "exchange" / name).values():
            if not report.is_sound or report.contradictions:
                raise ValueError(f"{report.path}: {[*report.faults, *report.contradictions][0]}")

    return read


def imported(name: str) -> Callable[[Path], None]:
    """A reader that makes a checkpoint of it."""

    def read(folder: Path) -> None:
        from fluxq.quantize.exchange.importing import import_model

        import_model(folder / "exchange" / name, folder / "imported", dequantize=True, overwrite=True)

    return read


FAMILIES = ("sana", "unet", "wan", "hidream", "z_image", "sd3", "clip", "qwen3", "qwen2_5_vl", "kl")
PROMPTS = (".txt", ".jsonl", ".json", ".yaml", ".csv", ".tsv", ".parquet")

EXCHANGE = {  # name below `exchange` -> the file that is damaged
    "comfy.safetensors": "comfy.safetensors",
    "nunchaku.safetensors": "nunchaku.safetensors",
    "model.gguf": "model.gguf",
    "torchao": "torchao/diffusion_pytorch_model.safetensors",
    "modelopt": "modelopt/config.json",
    "compressed_tensors": "compressed_tensors/config.json",
    "nunchaku_lite": "nunchaku_lite/config.json",
}
IMPORTED = ("torchao", "modelopt", "compressed_tensors", "nunchaku_lite")  # which need no base

_WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
TARGETS = {
    "weights": Target(f"model/{_WEIGHTS}", read_weights),
    "index": Target(f"model/{_WEIGHTS}.index.json", read_weights),
    "model_index": Target("model/model_index.json", read_weights),
    "config": Target("model/transformer/config.json", read_config),
    "encoder config": Target("model/text_encoder_2/config.json", read_config),
    "quantized config": Target("quantized/transformer/config.json", read_quantized_config),
    "quantized weights": Target(f"quantized/{_WEIGHTS}", verify_checkpoint),
    "plan": Target("quantized/fluxq_plan.json", verify_checkpoint),
    "subject": Target("quantized/fluxq_plan.json", read_subject),
    "load config": Target("quantized/transformer/config.json", load_checkpoint, by_library=True),
    "load weights": Target(f"quantized/{_WEIGHTS}", load_checkpoint, by_library=True),
    "lora": Target("lora.safetensors", read_lora),
    "statistics": Target("statistics.safetensors", read_statistics),
    "recipe": Target("recipe.yaml", read_recipe, FRAGMENTS + YAML_FRAGMENTS),
    "report": Target("report.json", read_report),
    "generation": Target("model/fluxq_generation.json", read_generation),
    "scheduler": Target("model/scheduler/scheduler_config.json", load_model),
    "tokenizer": Target("model/tokenizer/tokenizer.json", load_model, by_library=True),
    "tokenizer config": Target("model/tokenizer_2/tokenizer_config.json", load_model, by_library=True),
    **{f"{name} config": Target(f"families/{name}/one/config.json", config_of(name)) for name in FAMILIES},
    "second expert": Target("families/wan/two/config.json", config_of("wan")),
    "block": Target("work/0000.safetensors", read_block),
    "calls": Target("work/calls/batch-0000.json", read_calls),
    "call": Target("work/calls/batch-0000-transformer-000.safetensors", read_calls),
    "outputs": Target("work/outputs/block-000/00000.safetensors", read_outputs),
    "outputs done": Target("work/outputs/block-000/done.json", read_outputs),
    "levels": Target("work/levels.json", read_levels),
    **{f"inspect {name}": Target(f"exchange/{file}", inspected(name)) for name, file in EXCHANGE.items()},
    **{f"import {name}": Target(f"exchange/{EXCHANGE[name]}", imported(name)) for name in IMPORTED},
    "job": Target("begun/.out.0123456789abcdef.work/job.json", read_job),
    **{
        f"prompts{kind}": Target(f"prompts/p{kind}", prompts_in(kind), FRAGMENTS + YAML_FRAGMENTS * (kind == ".yaml"))
        for kind in PROMPTS
    },
}


# --- one case, watched
#
# Where a library reads first (`by_library`), its own errors, time and memory are its own; an error that passes through
# our code is not.


class Slow(BaseException):
    """Nothing but the watch catches it."""


class Watch:
    """Notes what is opened, stops what takes too long and denies memory, while it looks."""

    def __init__(self, folder: Path) -> None:
        from fluxq import tiny

        home = Path(__file__).resolve().parent.parent  # the package is read from there, with the recipes it ships
        allowed = [folder, home, tiny.path(), sys.prefix, sys.base_prefix, "/proc", "/sys"]
        self._allowed = tuple(str(Path(path).resolve()) + os.sep for path in allowed)
        self._looks, self.outside = False, set()
        sys.addaudithook(self._note)
        signal.signal(signal.SIGPROF, self._stop)

    @contextmanager
    def look(self) -> Iterator[None]:
        self.outside = set()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        self._looks = True
        try:
            yield
        finally:
            self._looks = False
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self._looks and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not f"{path}{os.sep}".startswith(self._allowed) or path.endswith("outside.safetensors"):
                self.outside.add(path)

    def _stop(self, *_: object) -> None:
        raise Slow


def limit_memory() -> None:
    """From now on this process gets no more than BYTES on top of what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def fault_of(target: Target, folder: Path, watch: Watch) -> tuple[bool, str]:
    """(whether the file was refused, what is wrong with how it was read or "")."""
    began, error = time.process_time(), None
    try:
        with watch.look():
            target.read(folder)
    except BaseException as raised:  # a panic of Rust's, or a hang, is no Exception
        error = raised
    seconds = time.process_time() - began
    if watch.outside:
        return True, f"opened {sorted(watch.outside)}"
    if (isinstance(error, Slow) or seconds > SECONDS) and not target.by_library:
        return True, f"took {seconds:.1f} s {_told(error)}"
    if error is None:
        return False, ""
    if target.by_library:
        frames = traceback.extract_tb(error.__traceback__)
        # Our from_pretrained is a lock around the library's.
        is_ours = any(Path(f.filename).is_relative_to(PACKAGE) and f.name != "from_pretrained" for f in frames)
        return True, _told(error) if is_ours and not isinstance(error, (ValueError, OSError)) else ""
    chain, link = [], error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    if any(isinstance(each, MemoryError) or "can't allocate memory" in str(each) for each in chain):
        return True, f"wanted more than {BYTES >> 20} MB {_told(error)}"
    if not isinstance(error, (ValueError, OSError)):
        return True, _told(error)
    named = (str(folder), Path(target.file).name)
    return True, "" if any(name in str(error) for name in named) else f"names no file: {_told(error)}"


def _told(error: BaseException | None) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:] if error else ()
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:200]!r} at {where}"


def main(folder: Path, seed: int, counts: dict[str, int]) -> dict[str, Any]:
    watch, found = Watch(folder), {"cases": 0, "refused": 0, "faults": []}
    originals = {name: folder / f"original {number}" for number, name in enumerate(counts)}
    for name, original in originals.items():
        target = TARGETS[name]
        shutil.copyfile(folder / target.file, original)
        target.read(folder)  # undamaged it is read, and what is imported lazily is there
    limit_memory()
    for name, count in counts.items():
        target = TARGETS[name]
        file, original = folder / target.file, originals[name]
        for number in range(count):
            write_damaged(file, original, target, random.Random(f"{seed} {name} {number}"))
            refused, fault = fault_of(target, folder, watch)
            found["cases"] += 1
            found["refused"] += refused
            if fault:
                found["faults"].append(f"{name} {number}: {fault}")
        shutil.copyfile(original, file)
    return found


if __name__ == "__main__":
    given = {name: int(count) for name, count in (text.split("=") for text in sys.argv[3:])}
    print(json.dumps(main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), given)))
