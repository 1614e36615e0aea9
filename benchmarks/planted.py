"""Faults planted in the product one at a time, each of which its tests have to catch.

    python -m benchmarks.planted                     20 minutes on 2 busy cores; ends with 1 if one is not caught
    python -m benchmarks.planted --only "lora: alpha ignored"
    python -m benchmarks.planted --list

Run it before and after tests are made fewer or faster: what was caught before is caught after. The tracked files are
copied once. All tests of the table have to be green there; then each fault in turn stands in its file while its tests
run, until the first one is red, in a process forked from one that has imported what takes long and is not ours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LONGEST = 1800  # seconds of one process


@dataclass(frozen=True)
class Fault:
    """A fault: text of a file that stands there once, what takes its place, and the tests that have to go red.

    tests: as pytest takes them, below tests/.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def misplaced(root: Path = ROOT, names: Iterable[str] | None = None) -> dict[str, str]:
    """Fault -> why it cannot be planted, in words: its text does not stand in its file, or more than once."""
    found = {}
    for name in FAULTS if names is None else names:
        fault = FAULTS[name]
        count = (root / fault.file).read_text(encoding="utf-8").count(fault.old)
        if count != 1 or fault.old == fault.new:
            found[name] = f"{fault.file} has its old text {count} times, expected once"
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", choices=FAULTS, help="this fault; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    asked = parser.parse_args(words)
    faults = {name: FAULTS[name] for name in asked.only or FAULTS}
    if asked.list:
        print("\n".join(f"{name}  ({fault.file})" for name, fault in faults.items()))
        return 0
    if wrong := misplaced(names=faults):
        print("\n".join(f"{name}: {why}" for name, why in wrong.items()))
        return 1
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "fluxq"
        _copy(root)
        _import_what_is_not_ours()
        code, red, output = _tested(root, dict.fromkeys(test for fault in faults.values() for test in fault.tests))
        if code != 0:
            print(output[-8000:], "\nNothing is planted yet, and this is red.", sep="\n")
            return 1
        caught: dict[str, dict[str, object]] = {}
        for name, fault in faults.items():
            start = time.monotonic()
            code, red, output = _planted(root, fault)
            is_red = code == 1 and bool(red)
            caught[name] = {"caught": is_red, "by": red, "seconds": round(time.monotonic() - start, 1)}
            said = red if is_red else f"NOBODY (exit code {code})\n{output[-2000:]}"
            print(f"{caught[name]['seconds']:6} s  {name}: {said}", flush=True)
    missed = [name for name, found in caught.items() if not found["caught"]]
    print(
        f"{len(faults) - len(missed)} of {len(faults)} caught.", *(f"Nobody caught {name}" for name in missed), sep="\n"
    )
    if asked.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        asked.json.write_text(json.dumps({"commit": commit.stdout.strip(), "faults": caught}, indent=1) + "\n")
    return bool(missed)


def _copy(root: Path) -> None:
    """Copy the files that git tracks, as they are in the working tree; links stay links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(os.path.lexists, map(str, (ROOT / name for name in listed.stdout.split("\0") if name))):
        target = root / Path(name).relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, target, follow_symlinks=False)


def _import_what_is_not_ours() -> None:
    """Seconds of each process, spent once."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # as conftest.py has it
    import diffusers
    import peft
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch

    torch.set_num_threads(1)
    _ = diffusers.FluxPipeline, diffusers.FluxTransformer2DModel, peft.LoraConfig  # which import the most of all


def _planted(root: Path, fault: Fault) -> tuple[int | None, str, str]:
    """Run the tests of a row while its fault is there."""
    file = root / fault.file
    sound = file.read_text(encoding="utf-8")
    file.write_text(sound.replace(fault.old, fault.new), encoding="utf-8")
    try:
        return _tested(root, fault.tests)
    finally:
        file.write_text(sound, encoding="utf-8")


def _tested(root: Path, tests: Iterable[str]) -> tuple[int | None, str, str]:
    """Exit code of pytest, None or below 0 where it did not end by itself; its first red test; and all that it said."""
    log = root.with_name("pytest.log")
    process = multiprocessing.get_context("fork").Process(target=_pytest, args=(root, [*tests], log))
    process.start()
    process.join(_LONGEST)
    if process.exitcode is None:
        process.kill()
    output = log.read_text(encoding="utf-8", errors="replace")
    red = re.search(r"^(?:FAILED|ERROR) tests/(.*)$", output, re.MULTILINE)
    return process.exitcode, red[1][:160] if red else "", output


def _pytest(root: Path, tests: list[str], log: Path) -> None:
    """Run tests of the copy in this process, as if nothing of the checkout had been imported."""
    with log.open("wb") as stream, contextlib.suppress(OSError):
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.chdir(root)
    os.environ |= {"PYTHONPATH": str(root / "src"), "TMPDIR": str(root.parent)}
    tempfile.tempdir = None
    sys.path[:] = [str(root / "src"), *(p for p in sys.path if p and not Path(p).is_relative_to(ROOT))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    import pytest

    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short"]
    sys.exit(pytest.main([*options, *(f"tests/{test}" for test in tests)]))


def _in(file: str, *tests: str) -> tuple[str, ...]:
    return tuple(f"{file}::{test}" for test in tests)


# name -> fault, by file, in the order of the rooms
FAULTS: dict[str, Fault] = {
    "files: fsync left out": Fault(
        "src/fluxq/base/files.py",
        "        os.fsync(handle)\n",
        "        os.fstat(handle)\n",
        _in("base/test_output.py", "test_all_is_on_the_disk_before_the_swap_and_the_swap_before_the_old_is_removed"),
    ),
    "output: swapped before its files are on the disk": Fault(
        "src/fluxq/base/output.py",
        "        sync(source)\n",
        "        sync(source, deep=False)\n",
        _in("base/test_output.py", "test_all_is_on_the_disk_before_the_swap_and_the_swap_before_the_old_is_removed"),
    ),
    "output: the old one removed before the swap": Fault(
        "src/fluxq/base/output.py",
        "                    place.rename(aside / place.name)\n",
        "                    remove(place)\n",
        _in("base/test_output.py", "test_a_swap_that_fails_at_any_move_changes_nothing"),
    ),
    "output: what a user changed is replaced": Fault(
        "src/fluxq/base/output.py",
        "            if not _is_as_recorded(path, names[name], place):\n",
        "            if not path.is_file():\n",
        _in("base/test_own_outputs.py", "test_what_a_user_changed_in_a_checkpoint_or_an_export_is_not_replaced"),
    ),
    "output: a signal ends a swap in the middle": Fault(
        "src/fluxq/base/output.py",
        "with _signals_wait():\n        aside.mkdir(parents=True)",
        "with nullcontext():\n        aside.mkdir(parents=True)",
        _in("base/test_output.py", "test_a_signal_in_the_middle_of_a_swap_waits_for_its_end"),
    ),
    "output: --overwrite replaces a stranger's folder": Fault(
        "src/fluxq/base/output.py",
        "        elif not (names and is_checkpoint and _LATER.fullmatch(name)):\n",
        "        elif names and not (is_checkpoint and _LATER.fullmatch(name)):\n",
        _in("commands/test_cli.py", "test_an_output_folder_that_is_not_empty_is_refused"),
    ),
    "tensors: a file that changes while it is read": Fault(
        "src/fluxq/base/tensors.py",
        "            is_same = _version(stream) == self._version\n",
        "            is_same = _version(stream) is not None\n",
        _in("base/test_tensors.py", "test_a_file_that_is_replaced_while_it_is_read_is_noticed"),
    ),
    "cost: instructions take no time": Fault(
        "recipes/cost.py",
        "        scalar += self.instructions.get(level, 0) / device.instructions_per_second",
        "        scalar += 0",
        _in("recipes/test_cost.py", "test_instructions_take_a_pass_s_time_where_its_bytes_take_less"),
    ),
    "recipe: an unknown key accepted": Fault(
        "recipes/computing.py",
        "            for key in value:\n                if key not in",
        "            value = {key: value[key] for key in cls.model_fields if key in value}\n"
        "            for key in value:\n                if key not in",
        _in("recipes/test_recipe.py", "test_a_mistake_is_named_with_file_line_and_cure"),
    ),
    "families: the last norm is not kept": Fault(
        "recipes/families/flux.py",
        'FINAL: ("norm_out.linear", "proj_out")',
        'FINAL: ("proj_out",)',
        _in("recipes/test_families.py", "test_every_linear_is_either_located_or_kept[flux-tiny_config]"),
    ),
    "patterns: a star crosses a dot": Fault(
        "recipes/family.py",
        'r"[^.]+" if segment == "*"',
        'r".+" if segment == "*"',
        _in("recipes/test_family.py", "test_what_does_not_match"),
    ),
    "plan: the first override wins": Fault(
        "recipes/plan.py",
        "    for override in reversed(overrides):\n",
        "    for override in overrides:\n",
        _in("recipes/test_plan.py", "test_the_last_override_that_matches_wins"),
    ),
    "plan: smoothing that does not fold": Fault(
        "recipes/plan.py",
        "not scheme.weights.has_row_scale:",
        "scheme.weights.block[0] != 1:",
        _in("recipes/test_plan.py", "test_portable_smooths_nothing_that_would_not_fold_exactly"),
    ),
    "recipe: a window's lower gate turned round": Fault(
        "recipes/recipe.py",
        'window[2].replace("<", ">")',
        "window[2]",
        _in("recipes/test_recipe.py", "test_gates"),
    ),
    "recipe: a gate excludes its bound": Fault(
        "recipes/recipe.py",
        '">=": operator.ge',
        '">=": operator.gt',
        _in("recipes/test_recipe.py", "test_gates"),
    ),
    "recipe: a share of the larger side": Fault(
        "recipes/recipe.py",
        "int(share * min(n, k) + Fraction(1, 2))",
        "int(share * max(n, k) + Fraction(1, 2))",
        _in("recipes/test_recipe.py", "test_a_share_is_of_the_smaller_side_to_the_nearest_whole_rank"),
    ),
    "adaln_quantize: the stride of another tensor": Fault(
        "kernels/adaln_quantize/kernel.py",
        "load_rows(gate, images, residual.stride_gate, columns, mask)",
        "load_rows(gate, images, modulation.stride_scale, columns, mask)",
        _in("kernels/test_adaln_quantize_kernel.py", "test_rows_of_each_tensor_have_a_distance_of_their_own"),
    ),
    "adaln_quantize: modulation without its 1": Fault(
        "kernels/adaln_quantize/kernel.py",
        "rounded(1.0 + load_rows(scale,",
        "rounded(0.0 + load_rows(scale,",
        _in("kernels/test_adaln_quantize_kernel.py", "test_rows_of_any_length[3]"),
    ),
    "attention: keys past the last one": Fault(
        "kernels/attention/kernel.py",
        't = tl.where((tokens < SKV)[None, :], t, float("-inf"))',
        't = tl.where((tokens <= SKV)[None, :], t, float("-inf"))',
        _in("kernels/test_attention_kernel.py", "test_attention_is_within_its_bound_of_float64[shape1-dtype0]"),
    ),
    "attention: sums not corrected": Fault(
        "kernels/attention/kernel.py",
        "total = total * correction + tl.sum(p, 1)",
        "total = total + tl.sum(p, 1)",
        _in("kernels/test_attention_kernel.py", "test_all_launches_together_are_near_the_op[None-fp8]"),
    ),
    "block_scaled_matmul: groups past K not masked": Fault(
        "kernels/block_scaled_matmul/kernel.py",
        "mask=(groups < G)[None, :], other=0.0)",
        "mask=(groups <= G)[None, :], other=0.0)",
        _in("kernels/test_block_scaled_matmul_kernel.py", "test_swizzled_scales_give_the_same_bits[mxfp8-shape0]"),
    ),
    "quantize_activation: a tie of 4 and 6 goes to 4": Fault(
        "kernels/codes.py",
        "rounding_error(tl.abs(wide), ratio[:, :, None], ROWS, COLUMNS, GROUP) < least",
        "rounding_error(tl.abs(wide), ratio[:, :, None], ROWS, COLUMNS, GROUP) <= least",
        _in("kernels/test_quantize_activation_kernel.py", "test_ties_between_four_and_six_go_to_six"),
    ),
    "dispatch: a kernel that was wrong is offered": Fault(
        "kernels/dispatch.py",
        "    return why or findings.wrong(op, format, chip)\n",
        "    return why\n",
        _in("kernels/test_findings.py", "test_a_cell_that_was_wrong_is_not_offered_and_the_reason_said"),
    ),
    "proofs: a first launch is not compared": Fault(
        "kernels/proofs.py",
        "    if not wrong:\n",
        "    if True:\n",
        _in(
            "kernels/test_proofs.py",
            "test_a_wrong_kernel_is_withdrawn_at_its_first_launch_and_the_call_computed_anew",
        ),
    ),
    "input_gradient: scales of rows left out of the codes": Fault(
        "kernels/input_gradient/op.py",
        "quantize_activation(grad.float() * row_scale(q), FORMATS[codes])",
        "quantize_activation(grad.float(), FORMATS[codes])",
        _in("kernels/test_input_gradient.py", "test_codes_cost_a_gradient_what_8_bit_cost[int8]"),
    ),
    "input_gradient: one global scale for all rows": Fault(
        "kernels/input_gradient/kernel.py",
        "tl.load(w.global_scale + w_rows, mask=ns < N, other=0.0)",
        "tl.load(w.global_scale + w_rows * 0, mask=ns < N, other=0.0)",
        _in("kernels/test_input_gradient_kernel.py", "test_a_global_scale_of_each_row_is_part_of_the_weight"),
    ),
    "input_gradient: no reference where no kernel is": Fault(
        "kernels/launch.py",
        "if is_strict() or not (error.was_wrong or (name in OPS and OPS[name].or_reference)):",
        "if is_strict() or not error.was_wrong:",
        _in("kernels/test_input_gradient.py", "test_what_has_no_kernel_takes_the_reference_and_says_why"),
    ),
    "dispatch: a chip without the product": Fault(
        "kernels/library.py",
        'chips=("sm_90", *_BLACKWELL),',
        'chips=("sm_89", "sm_90", *_BLACKWELL),',
        _in("kernels/test_dispatch.py", "test_the_library_serves_what_it_can"),
    ),
    "encode: integers cut, not rounded": Fault(
        "kernels/encode.py",
        "        return x.round_().to(torch.int8)\n",
        "        return x.to(torch.int8)\n",
        _in("kernels/test_encode.py", "test_every_bf16_number_rounds_to_the_nearest_even_code[int8]"),
    ),
    "encode: subnormal steps half as wide": Fault(
        "kernels/encode.py",
        "power.clamp_(element.smallest_normal * unit,",
        "power.clamp_(element.smallest_normal * unit / 2,",
        _in("kernels/test_encode.py", "test_every_bf16_number_rounds_to_the_nearest_even_code[e2m1]"),
    ),
    "encode: high nibble first": Fault(
        "kernels/encode.py",
        "    pairs |= pairs >> 4\n",
        "    pairs = pairs << 4 | pairs >> 8\n",
        _in("kernels/test_encode.py", "test_the_even_element_is_packed_into_the_low_nibble"),
    ),
    "encode: exponent one too large at the limit": Fault(
        "kernels/encode.py",
        "(mantissa > float(limit))",
        "(mantissa >= float(limit))",
        _in("kernels/test_encode.py", "test_the_ceil_rule_takes_the_smallest_power_of_two_that_does_not_saturate"),
    ),
    "encode: global scale not decoded": Fault(
        "kernels/encode.py",
        "    return value if global_scale is None else value * global_scale\n",
        "    return value\n",
        _in(
            "kernels/test_linear.py",
            "test_the_output_is_the_simulation_bit_for_bit[(1, 256)-bias-bf16-nvfp4-nvfp4-static]",
        ),
    ),
    "encode: infinity gets a finite scale": Fault(
        "kernels/encode.py",
        "scale = torch.where(torch.isfinite(amax), scale, torch.nan)",
        "scale = torch.where(torch.isnan(amax), torch.nan, scale)",
        _in("kernels/test_encode.py", "test_nan_and_infinity_in_activations_turn_their_own_block_into_nan[nvfp4-inf]"),
    ),
    "encode: no room above calibrated amax": Fault(
        "kernels/encode.py",
        "_ROOM = 1.5 ",
        "_ROOM = 1.0 ",
        _in(
            "kernels/test_encode.py",
            "test_a_calibrated_scale_of_fp8_is_a_power_of_two_with_room_for_half_as_much_again",
        ),
    ),
    "epilogue: bias subtracted": Fault(
        "kernels/epilogue.py",
        "value = value + tl.load(following.bias + columns",
        "value = value - tl.load(following.bias + columns",
        _in("kernels/test_scaled_matmul_kernel.py", "test_int8_gives_the_bits_of_the_reference[shape0]"),
    ),
    "epilogue: gate of another image": Fault(
        "kernels/epilogue.py",
        "(rows // following.gate.tokens)[:, None] * N",
        "(rows // M)[:, None] * N",
        _in(
            "kernels/test_scaled_matmul_kernel.py",
            "test_what_follows_the_product_is_computed_in_fp32[gate of each image and residual-int8]",
        ),
    ),
    "linear: scales cast along with a move": Fault(
        "kernels/linear.py",
        "                stored[id(tensor)] = probe.device\n",
        "                stored.pop(id(tensor), None)\n",
        _in("kernels/test_linear.py", "test_a_cast_to_the_dtype_it_computes_in_is_a_move"),
    ),
    "ops: hadamard left out": Fault(
        "kernels/ops.py",
        "        v.copy_(_hadamard_rows(v, hadamard, regular))\n",
        "        _hadamard_rows(v, hadamard, regular)\n",
        _in(
            "kernels/test_transformed_layers.py",
            "test_the_output_is_the_simulation_bit_for_bit[(1, 128)-bf16-int8-int8-h32]",
        ),
    ),
    "ops: low-rank branch reads what was rounded": Fault(
        "kernels/ops.py",
        "y += F.linear(F.linear(rows, operands.lora_a.to(x.dtype)), operands.lora_b.to(x.dtype))",
        "y += F.linear(F.linear(z.to(x.dtype), operands.lora_a.to(x.dtype)), operands.lora_b.to(x.dtype))",
        _in(
            "kernels/test_linear.py",
            "test_a_low_rank_branch_computes_what_two_linears_beside_the_layer_would[dtype0-fp8-fp8]",
        ),
    ),
    "ops: gradient divided by smoothing": Fault(
        "kernels/ops.py",
        "grad_z if smooth is None else grad_z * smooth.float()",
        "grad_z if smooth is None else grad_z / smooth.float()",
        _in(
            "kernels/test_transformed_layers.py", "test_gradients_are_those_of_the_plain_linear[fp8-fp8-center-smooth]"
        ),
    ),
    "qk_norm_rope: rotated the other way": Fault(
        "kernels/qk_norm_rope/kernel.py",
        "a * cos_a - b * sin_a, b * cos_b + a * sin_b",
        "a * cos_a + b * sin_a, b * cos_b - a * sin_b",
        _in("kernels/test_qk_norm_rope_kernel.py", "test_a_head_without_weights_is_only_normalized"),
    ),
    "qk_norm_rope: the first stream's tokens twice": Fault(
        "kernels/qk_norm_rope/kernel.py",
        "second, image, s - S_FIRST",
        "first, image, s - S_FIRST",
        _in("kernels/test_qk_norm_rope_kernel.py", "test_two_streams_are_each_of_them_by_itself"),
    ),
    "quantize_activation: rows past the last count": Fault(
        "kernels/quantize_activation/kernel.py",
        "tl.max(tl.where(rows < M, bits, 0), 0)",
        "tl.max(bits, 0)",
        _in("kernels/test_quantize_activation_kernel.py", "test_rows_beyond_x_do_not_count_for_the_scale_of_a_tensor"),
    ),
    "quantize_activation: the other half of a gate": Fault(
        "kernels/quantize_activation/kernel.py",
        "        values = rounded(values * rounded(silu(other), x), x)\n",
        "        values = rounded(rounded(silu(values), x) * other, x)\n",
        _in("kernels/test_act_quantize_kernel.py", "test_activations_of_ragged_rows[5]"),
    ),
    "scaled_matmul: a group of tiles too high": Fault(
        "kernels/scaled_matmul/kernel.py",
        "height = tl.minimum(tiles_m - first, GROUP_M)",
        "height = GROUP_M",
        _in("kernels/test_scaled_matmul_kernel.py", "test_int8_gives_the_bits_of_the_reference[shape3]"),
    ),
    "scaled_matmul: columns past K not masked": Fault(
        "kernels/scaled_matmul/kernel.py",
        "            right = tl.load(w_rows + ks[None, :], mask=(ks < K)[None, :], other=0.0)\n",
        "            right = tl.load(w_rows + ks[None, :])\n",
        _in("kernels/test_scaled_matmul_kernel.py", "test_int8_gives_the_bits_of_the_reference[shape1]"),
    ),
    "tensor: scales swizzled by other quarters": Fault(
        "kernels/tensor.py",
        "    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scale.dtype)",
        "    return tiles.permute(0, 3, 1, 2, 4).flatten().view(scale.dtype)",
        _in("kernels/test_products.py", "test_swizzled_scales_lie_where_the_matrix_unit_reads_them"),
    ),
    "tiles: the limit of tokens excluded": Fault(
        "kernels/tiles.py",
        "m <= self.max_m)",
        "m < self.max_m)",
        _in("kernels/test_dispatch.py", "test_fp32_tokens_of_weight_only_layers_are_multiplied_in_fp32[64-1]"),
    ),
    "transforms: smoothing inverted": Fault(
        "kernels/transforms.py",
        "v = w if self.smooth is None else w / self.smooth\n",
        "v = w if self.smooth is None else w * self.smooth\n",
        _in("kernels/test_transforms.py", "test_output_is_the_same_before_rounding[smooth-0]"),
    ),
    "transforms: sign of the mean in the Gram": Fault(
        "kernels/transforms.py",
        "rest = mean - self.mean / 2",
        "rest = mean + self.mean / 2",
        _in("kernels/test_transforms.py", "test_gram_is_that_of_the_transformed_tokens[center]"),
    ),
    "w4a8_matmul: multiplier in fp32": Fault(
        "kernels/w4a8_matmul/kernel.py",
        "m = (multiplier * inverse).to(tl.bfloat16).to(tl.float32)",
        "m = multiplier * inverse",
        _in("kernels/test_w4a8_matmul_kernel.py", "test_many_tiles_in_groups[nvfp4-int8]"),
    ),
    "w4a8_matmul: one global scale for all rows": Fault(
        "kernels/w4a8_matmul/kernel.py",
        "tl.load(w.global_scale + w_rows * w.stride_global)",
        "tl.load(w.global_scale + w_rows * 0)",
        _in("kernels/test_w4a8_matmul_kernel.py", "test_a_global_scale_of_each_row_is_taken"),
    ),
    "weight_only_matmul: NaN codes of a row not seen": Fault(
        "kernels/weight_only_matmul/kernel.py",
        "((nans & -0x7F7F7F80) != 0)",
        "((nans & 0x7F7F7F7F) == -1)",
        _in("kernels/test_weight_only_matmul_kernel.py", "test_a_nan_spoils_its_own_row_alone[fp8-gemv]"),
    ),
    "work: a damaged file is taken": Fault(
        "src/fluxq/base/tensors.py",
        "        if metadata.pop(_SEAL, None) != _seal(self.path, metadata, described):\n",
        "        if False:\n",
        _in("quantize/test_lasting.py", "test_damaged_files_of_the_work_folder_are_made_again"),
    ),
    "work: a file of another place is taken": Fault(
        "src/fluxq/base/files.py",
        '    return "/".join(parts[begin:]).casefold()  # as some disks have it\n',
        '    return ""\n',
        _in("quantize/test_lasting.py", "test_a_block_in_place_of_another_is_not_taken"),
    ),
    "output: what came meanwhile is replaced": Fault(
        "src/fluxq/base/output.py",
        "                _require_replaceable(output, aside / output.place.name, overwrite)\n",
        "                pass\n",
        _in("base/test_output.py", "test_what_is_put_there_while_the_old_is_judged_is_not_replaced"),
    ),
    "blocks: outputs of another job go on": Fault(
        "calibrate/blocks.py",
        '            if read_json(path).get("digest") != self.digest:\n',
        "            if False:\n",
        _in("calibrate/test_blocks.py", "test_outputs_of_another_job_or_an_unfinished_block_are_not_used"),
    ),
    "capture: the last image skipped": Fault(
        "calibrate/capture.py",
        "for start in range(0, len(group), run))",
        "for start in range(0, max(len(group) - 1, 1), run))",
        _in("calibrate/test_capture.py", "test_batch_size_changes_nothing_but_the_last_bits"),
    ),
    "capture: shares of another job taken": Fault(
        "calibrate/capture.py",
        "what = [asdict(trajectory), list(layers), batch_size]",
        "what = [list(layers), batch_size]",
        _in("calibrate/test_capture.py", "test_shares_of_another_run_in_the_folder_are_not_taken"),
    ),
    "capture: a step told late": Fault(
        "calibrate/capture.py",
        "                on_step(step + 1)\n",
        "                on_step(step)\n",
        _in("calibrate/test_capture.py", "test_steps_are_announced_before_they_run_in_every_batch"),
    ),
    "inputs: held-out tokens are fitted to": Fault(
        "calibrate/inputs.py",
        "            if not held_out:\n                self._add_products(chunk, weight)\n",
        "            self._add_products(chunk, weight)\n",
        _in("calibrate/test_inputs.py", "test_held_out_tokens_enter_amax_alone"),
    ),
    "prompts: an image known by its name alone": Fault(
        "calibrate/prompts.py",
        'f"sha256:{v.sha256}"',
        'f"sha256:{v.path.name}"',
        _in("calibrate/test_rows.py", "test_the_digest_knows_images_by_their_bytes_and_plain_prompts_as_ever"),
    ),
    "statistics: largest number, not magnitude": Fault(
        "calibrate/statistics.py",
        "values.abs().amax(0).float().cpu()",
        "values.amax(0).float().cpu()",
        _in("calibrate/test_statistics.py", "test_sums_are_those_of_all_tokens"),
    ),
    "statistics: a group's digest without its numbers": Fault(
        "calibrate/statistics.py",
        ".encode() + tensor.numpy().tobytes())",
        ".encode())",
        _in("calibrate/test_statistics.py", "test_the_content_digest_covers_the_numbers"),
    ),
    "bfl: another program's mark": Fault(
        "quantize/exchange/bfl.py",
        'or ("nvfp4" in formats and any(map(_FUSED.search, model.groups)))',
        "",
        _in("exchange/test_inspect.py", "test_bfls_word_in_the_header_of_a_file_for_comfyui_does_not_make_it_bfls"),
    ),
    "bnb: low nibble first": Fault(
        "quantize/exchange/bnb.py",
        "torch.stack([codes >> 4, codes & 0xF], dim=-1)",
        "torch.stack([codes & 0xF, codes >> 4], dim=-1)",
        _in("exchange/test_layers.py", "test_bitsandbytes_nf4_by_its_definition"),
    ),
    "comfy: nibbles not swapped": Fault(
        "quantize/exchange/comfy.py",
        "pad(swap_nibbles(weight), 16, 8)",
        "pad(weight, 16, 8)",
        _in(
            "exchange/test_layers.py",
            "test_what_a_dialect_holds_comes_back_byte_for_byte_and_the_rest_is_refused[comfy]",
        ),
    ),
    "comfy: scales of groups not transposed": Fault(
        "quantize/exchange/comfy.py",
        "        turned = scale.T.contiguous()\n",
        "        turned = scale.reshape(scale.shape[::-1]).contiguous()\n",
        _in(
            "exchange/test_layers.py",
            "test_what_a_dialect_holds_comes_back_byte_for_byte_and_the_rest_is_refused[comfy]",
        ),
    ),
    "compressed_tensors: global scale not inverted": Fault(
        "quantize/exchange/compressed_tensors.py",
        "tensors[theirs] = (1 / value).reshape(1)",
        "tensors[theirs] = value.reshape(1)",
        _in(
            "exchange/test_layers.py",
            "test_what_a_dialect_holds_comes_back_byte_for_byte_and_the_rest_is_refused[compressed_tensors]",
        ),
    ),
    "proof: one number off passes": Fault(
        "quantize/exchange/folding.py",
        "<= _STRAY * most * size).all())",
        "<= _STRAY * most * size).any())",
        _in(
            "exchange/test_export.py",
            "test_one_number_of_a_bias_that_carries_a_folded_mean_is_found[double_blocks.0.img_mod.lin[260]]",
        ),
    ),
    "import: what the base does not prove": Fault(
        "quantize/exchange/importing.py",
        "        if fault.is_error and fault.kind not in _MENDED:\n",
        "        if fault.is_error and fault.kind in _MENDED:\n",
        _in("exchange/test_import.py", "test_what_is_not_the_bases_is_refused_by_name_and_nothing_is_left"),
    ),
    "layouts: pads rows by another multiple": Fault(
        "quantize/exchange/layouts.py",
        "padding = (0, -k % columns, 0, -n % rows)",
        "padding = (0, -k % rows, 0, -n % columns)",
        _in("exchange/test_layouts.py", "test_nibbles_and_padding_have_inverses"),
    ),
    "modelopt: branch not divided by smoothing": Fault(
        "quantize/exchange/modelopt.py",
        'tensors["svdquant_lora_a"].float() / tensors["pre_quant_scale"].float()',
        'tensors["svdquant_lora_a"].float()',
        _in(
            "exchange/test_layers.py",
            "test_what_a_dialect_holds_comes_back_byte_for_byte_and_the_rest_is_refused[modelopt]",
        ),
    ),
    "nunchaku: pairs of a lane exchanged": Fault(
        "quantize/exchange/nunchaku.py",
        "_DOWN: Tiling = (((0, 2, 8), (0, 2, 4, 2)), (3, 0, 2, 5, 1, 4, 6))",
        "_DOWN: Tiling = (((0, 2, 8), (0, 2, 4, 2)), (3, 0, 2, 5, 4, 1, 6))",
        _in("exchange/test_layouts.py", "test_nunchaku_tiles_follow_the_closed_formulas"),
    ),
    "nunchaku: GELU's shift added to the bias": Fault(
        "quantize/exchange/nunchaku.py",
        'tensors["bias"] = _bias_without_shift(layer, -1)',
        'tensors["bias"] = _bias_without_shift(layer, 1)',
        _in("exchange/test_layouts.py", "test_nunchaku_takes_the_shift_behind_gelu_from_the_bias"),
    ),
    "torchao: tiles one line short": Fault(
        "quantize/exchange/torchao.py",
        "return padded(rows, 128) // 4, padded(groups, 4) * 4",
        "return padded(rows, 128), padded(groups, 4)",
        _in(
            "exchange/test_layers.py",
            "test_the_golden_input_quantized_and_exported_is_the_producers_file[torchao_mxfp8]",
        ),
    ),
    "group: fitting tokens decide": Fault(
        "quantize/group.py",
        "errors, weight = self._errors(state, weights, self.inputs.held_out), self.inputs.held_weight",
        "errors, weight = self._errors(state, weights, self.inputs.fit), torch.ones(len(self.inputs.fit))",
        _in("quantize/test_group.py", "test_held_out_tokens_decide_and_are_not_fitted_to"),
    ),
    "group: joined weights scaled one by one": Fault(
        "quantize/group.py",
        "together.setdefault(layer.scheme.weights.name if layer.joined else layer.name, [])",
        "together.setdefault(layer.name, [])",
        _in("quantize/test_group.py", "test_joined_weights_with_one_scale_each_share_it[False]"),
    ),
    "group: single tokens not looked at": Fault(
        "quantize/group.py",
        "if not db <= MOST_LOST)",
        "if db > 1e9)",
        _in("quantize/test_group.py", "test_a_massive_token_does_not_decide_for_the_others"),
    ),
    "group: one half of the tokens is enough": Fault(
        "quantize/group.py",
        "or all(half > before for half, before in pairs)",
        "or any(half > before for half, before in pairs)",
        _in("quantize/test_group.py", "test_a_gain_in_one_half_of_the_held_out_tokens_may_be_chance"),
    ),
    "group: factors to fold are no powers of two": Fault(
        "quantize/group.py",
        "factor = factor.log2().round().exp2()",
        "factor = factor.log2().exp2()",
        _in(
            "quantize/test_group.py",
            "test_groups_that_share_a_maker_have_one_mean_and_factors_that_are_powers_of_two",
        ),
    ),
    "inputs: no massive token held out": Fault(
        "calibrate/inputs.py",
        "top = count // self.largest if self.largest and count < total else 0",
        "top = 0",
        _in("calibrate/test_inputs.py", "test_a_held_out_sample_has_the_massive_tokens_and_stands_for_all"),
    ),
    "flux2: factors into the gate": Fault(
        "recipes/families/flux2.py",
        'Producer("attn.to_qkv_mlp_proj", chunk=-1, shifts=False, segment=1)',
        'Producer("attn.to_qkv_mlp_proj", chunk=-2, shifts=False, segment=1)',
        _in("recipes/test_producers.py", "test_what_is_folded_changes_nothing[flux2]"),
    ),
    "family: text values take no part": Fault(
        "recipes/family.py",
        'values = ("attn.to_v", "attn.add_v_proj")',
        'values = ("attn.to_v",)',
        _in("recipes/test_producers.py", "test_what_is_folded_changes_nothing[flux]"),
    ),
    "native: exponents multiplied as numbers": Fault(
        "quantize/exchange/native.py",
        "exponents[rows] += _exponents(factors, scale)",
        "exponents[rows] *= _exponents(factors, scale)",
        _in("exchange/test_export.py", "test_scales_of_every_format_take_powers_of_two_in[mxfp4]"),
    ),
    "native: a 16-bit reader keeps its weight": Fault(
        "quantize/exchange/native.py",
        "weight = (weight.flatten(1) / vectors.factors).view_as(weight)",
        "weight = weight.flatten(1).view_as(weight)",
        _in(
            "exchange/test_export.py",
            "test_values_and_projections_in_16_bit_take_part_in_a_fold[transformer_blocks.*.attn.to_add_out]",
        ),
    ),
    "plan: block scales take any factor": Fault(
        "recipes/plan.py",
        "powers_of_two=not takes_any)",
        "powers_of_two=False)",
        _in("recipes/test_plan.py", "test_values_with_an_fp32_scale_for_each_row_take_any_factor_in[nvfp4-True]"),
    ),
    "folding: single channels may have any factor": Fault(
        "quantize/exchange/folding.py",
        "<= _FEW and off.max() <= _FAR)\n\n\ndef differ",
        "<= 1)\n\n\ndef differ",
        _in("exchange/test_folding.py", "test_values_and_projections_agree[fp8-fp8-squared]"),
    ),
    "folding: one value may lack the mean": Fault(
        "quantize/exchange/folding.py",
        "if rows is None:\n                continue",
        "if rows is None or path:\n                continue",
        _in("exchange/test_folding.py", "test_values_and_projections_agree[fp8-fp8-one value lacks the mean]"),
    ),
    "folding: biases of values may lack their factors": Fault(
        "quantize/exchange/folding.py",
        "if by is not None and makes_values and name not in wrong",
        "if by is not None and not makes_values and name not in wrong",
        _in("exchange/test_folding.py", "test_values_and_projections_agree[fp8-fp8-biases of values are the base's]"),
    ),
    "folding: a mean that values lack is not looked for": Fault(
        "quantize/exchange/folding.py",
        "            wrong[name], errors[name] = (bias, base + weight @ mean), weight.square() @ error",
        "            pass",
        _in("exchange/test_export.py", "test_one_number_of_a_bias_that_carries_a_folded_mean_is_found[none]"),
    ),
    "lora: alpha ignored": Fault(
        "quantize/lora.py",
        'lora.weight * float(module.scaling["fused"])',
        "lora.weight",
        _in("quantize/test_lora.py", "test_the_sum_is_what_diffusers_fuses_into_a_16_bit_model"),
    ),
    "lora: the second file of a layer ignored": Fault(
        "quantize/lora.py",
        "    deltas = [update.delta.to(weight.device).view_as(weight) for update in updates]\n",
        "    deltas = [update.delta.to(weight.device).view_as(weight) for update in updates[:1]]\n",
        _in("quantize/test_lora.py", "test_two_files_that_change_one_layer_add_up"),
    ),
    "lora: a changed file is fused again": Fault(
        "quantize/lora.py",
        "        if not lora.path.is_file() or lora.digest != recorded.sha256:\n",
        "        if not lora.path.is_file():\n",
        _in("quantize/test_lora.py", "test_evaluating_needs_the_lora_that_was_fused"),
    ),
    "nearest: joined weights rounded one by one": Fault(
        "quantize/nearest.py",
        "together.setdefault(layer.scale_group or layer.name, [])",
        "together.setdefault(layer.name, [])",
        _in("quantize/test_checkpoint.py", "test_joined_layers_share_their_scales[transformer_blocks.0-members0]"),
    ),
    "rounding: columns of small inputs first": Fault(
        "quantize/rounding.py",
        "inside[blocks.mean(1).argsort(stable=True)]",
        "inside[blocks.mean(1).argsort(stable=True, descending=True)]",
        _in("quantize/test_rounding.py", "test_columns_of_large_inputs_are_rounded_first"),
    ),
    "rounding: feedback of the rounded weight": Fault(
        "quantize/rounding.py",
        "error[column] = columns[column] - value * step",
        "error[column] = target[at] - value * step",
        _in("quantize/test_rounding.py", "test_feedback_is_gptq_by_its_textbook_form"),
    ),
    "rounding: importance ignored": Fault(
        "quantize/rounding.py",
        ".square_().mul_(importance).sum(-1)",
        ".square_().sum(-1)",
        _in("quantize/test_rounding.py", "test_search_weighs_errors_and_never_loses_to_the_plain_scale[nvfp4]"),
    ),
    "verify: settings' digest not compared": Fault(
        "quantize/verify.py",
        "        if config_digest(checkpoint.folder, component) != digest:\n",
        "        if not config_digest(checkpoint.folder, component):\n",
        _in("quantize/test_verify.py", "test_altered_settings_are_found_without_a_plan_file[vae/config.json-<lambda>]"),
    ),
    "verify: an unrecorded file passes": Fault(
        "quantize/verify.py",
        "        if at_root or name.parts[0] in components or (not components and is_weights):\n",
        "        if at_root or (not components and is_weights):\n",
        _in(
            "quantize/test_verify.py",
            "test_what_nobody_recorded_and_a_loader_may_read_is_found[text_encoder_2/adapter_config.json]",
        ),
    ),
    "verify: tensors' digest not compared": Fault(
        "quantize/verify.py",
        "        if checkpoint.folder.tensors_digest(component) != digest:\n",
        "        if not checkpoint.folder.tensors_digest(component):\n",
        _in("quantize/test_verify.py", "test_without_the_plan_file_digests_in_config_json_still_tell"),
    ),
    "verify: a scale of zero is sound": Fault(
        "quantize/verify.py",
        "torch.isfinite(t.float()) & (t.float() > 0)",
        "torch.isfinite(t.float()) & (t.float() >= 0)",
        _in("quantize/test_verify.py", "test_one_bad_value_is_found_though_the_hash_agrees"),
    ),
    "attention_choice: a causal mask in fp8": Fault(
        "src/fluxq/runtime/attention_choice.py",
        'or how.get("is_causal"):',
        'and how.get("is_causal"):',
        _in(
            "runtime/test_attention_choice.py",
            "test_what_fp8_is_not_for_is_computed_in_16_bit_and_said_once[a causal mask]",
        ),
    ),
    "fused: shift and scale exchanged": Fault(
        "src/fluxq/runtime/fused_forms.py",
        "return chunks[::-1] if len(chunks) == 2 else chunks",
        "return chunks",
        _in("runtime/test_fused_families.py", "test_fused_is_unfused_byte_for_byte[16 bit-sd3]"),
    ),
    "graphs: a moved weight is not copied back": Fault(
        "src/fluxq/runtime/graphs.py",
        "            recorded.copy_(tensor)\n            tensor.data = recorded\n",
        "            tensor.data = recorded\n",
        _in("runtime/test_graphs.py", "test_a_weight_that_moved_is_taken_back[by_data]"),
    ),
    "graphs: what was returned is overwritten": Fault(
        "src/fluxq/runtime/graphs.py",
        "leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in outputs",
        "leaf for leaf in outputs",
        _in("runtime/test_graphs.py", "test_what_was_returned_stays_when_the_next_call_replays"),
    ),
    "graphs: what later steps read of a computed one is not kept": Fault(
        "src/fluxq/runtime/graphs.py",
        "        mine.copy_(made)\n",
        "        mine.zero_()\n",
        _in("runtime/test_first_block.py", "test_a_step_cache_has_a_graph_for_each_decision[16 bit-as loaded]"),
    ),
    "graphs: rows that were not found are taken": Fault(
        "src/fluxq/runtime/graphs.py",
        "        has_row, _ = self._launch(recording)\n",
        "        has_row = bool(self._launch(recording))\n",
        _in("runtime/test_graphs_hoisted.py", "test_a_timestep_that_is_none_of_the_schedulers_has_the_right_image"),
    ),
    "modulation: a recorded step takes another row": Fault(
        "src/fluxq/runtime/modulation.py",
        "equal.int().argmax(0, keepdim=True)",
        "equal.int().argmin(0, keepdim=True)",
        _in("runtime/test_graphs_hoisted.py", "test_modulation_is_looked_up_in_the_graph"),
    ),
    "prepare: another file is saved as the codes": Fault(
        "src/fluxq/runtime/layout.py",
        '    if fingerprint_of(stored["weight"]) != prepared.digest:\n',
        '    if not fingerprint_of(stored["weight"]):\n',
        _in("runtime/test_prepare.py", "test_files_that_are_gone_or_changed_are_named_when_saving"),
    ),
    "modulation: an edited weight is not seen": Fault(
        "src/fluxq/runtime/modulation.py",
        "if outputs is None or made_with != state:",
        "if outputs is None:",
        _in(
            "runtime/test_modulation.py",
            "test_weights_changed_between_calls_are_seen_by_the_next_one_and_merged_or_copied_ones_at_once",
        ),
    ),
    "modulation: the first image of a batch stands for all": Fault(
        "src/fluxq/runtime/modulation.py",
        "(embeddings == temb).flatten(1).all(1)",
        "(embeddings == temb)[:, 0].flatten(1).all(1)",
        _in("runtime/test_modulation.py", "test_two_prompts_a_step_that_share_their_first_image_are_told_apart"),
    ),
    "shard: the bias of each rank is added": Fault(
        "src/fluxq/runtime/shard.py",
        "        if rank and bias is not None:\n",
        "        if rank > 1 and bias is not None:\n",
        _in(
            "kernels/test_transformed_layers.py", "test_inputs_cut_over_ranks_add_up_to_the_whole_layer[int8-int8-h32]"
        ),
    ),
    "side by side: tiles of swizzled scales in parts": Fault(
        "src/fluxq/runtime/side_by_side.py",
        "unit = SWIZZLED_ROWS if is_swizzled else",
        "unit = 1 if is_swizzled else",
        _in("runtime/test_side_by_side.py", "test_swizzled_scales_follow_one_another_in_whole_tiles[sizes1-False]"),
    ),
    "side by side: whatever lies behind": Fault(
        "src/fluxq/runtime/side_by_side.py",
        "        and before.untyped_storage()._cdata == part.untyped_storage()._cdata\n",
        "",
        _in("runtime/test_side_by_side.py", "test_neighbours_are_of_one_memory"),
    ),
    "side by side: the first global scale for all": Fault(
        "src/fluxq/runtime/side_by_side.py",
        " or not all(map(given[0].equal, given))",
        "",
        _in("runtime/test_side_by_side.py", "test_a_global_scale_of_one_value_is_one_tensor"),
    ),
    "steps: one too few at the end": Fault(
        "src/fluxq/runtime/steps.py",
        "not total - steps.last <= step < total",
        "not total - steps.last < step < total",
        _in("runtime/test_steps.py", "test_other_steps_than_the_recipes_are_asked_for[0-1-qqqqk]"),
    ),
    "steps: attention stays in fp8": Fault(
        "src/fluxq/runtime/steps.py",
        "        store.enter()\n        self._set_attention()\n",
        "        store.enter()\n",
        _in("runtime/test_steps.py", "test_attention_in_fp8_is_16_bit_meanwhile"),
    ),
    "damage: the floor is damage": Fault(
        "eval/debug/damage.py",
        "return max(error - self.floor, 0.0) / self.above_floor",
        "return max(error, 0.0) / self.above_floor",
        _in("eval/test_damage.py", "test_the_floor_is_no_damage"),
    ),
    "images: of another batch size reused": Fault(
        "eval/images/executor.py",
        '            "batch_size": self.batch_size,\n',
        "",
        _in("eval/test_executor.py", "test_what_decides_bits_decides_the_key"),
    ),
    "images: other bytes reused": Fault(
        "eval/images/executor.py",
        "            elif _digest(path) != expected:\n",
        "            elif not _digest(path):\n",
        _in("eval/test_executor.py", "test_the_audit_names_what_is_wrong[changed image]"),
    ),
    "images: each seed twice": Fault(
        "eval/images/protocols.py",
        "first_seed + index * seeds + image)",
        "first_seed + index + image)",
        _in("eval/test_protocols.py", "test_items_give_every_image_a_seed_of_its_own"),
    ),
    "drift: the other pipeline is not steered": Fault(
        "eval/metrics/drift.py",
        "        whole[image][step] += float(v.double().square().sum())\n        return v\n",
        "        whole[image][step] += float(v.double().square().sum())\n        return velocity\n",
        _in("eval/test_drift.py", "test_the_other_pipeline_is_fed_what_the_16_bit_one_was_fed"),
    ),
    "metrics: two sets of other seeds compared": Fault(
        "eval/metrics/evaluate.py",
        "    if tuple(reference.items) != tuple(quantized.items):\n",
        "    if len(reference.items) != len(quantized.items):\n",
        _in("eval/test_evaluate.py", "test_other_prompts_are_not_compared"),
    ),
    "metrics: decibels of images, cut to bytes": Fault(
        "eval/metrics/fidelity.py",
        "10 * torch.log10(255**2 / (a.double() - b.double()).square().mean())",
        "10 * torch.log10(255**2 / (a - b).double().square().mean())",
        _in("eval/test_fidelity.py", "test_psnr_does_not_wrap_around_in_uint8"),
    ),
    "metrics: flat where 16 bit is flat too": Fault(
        "eval/metrics/fidelity.py",
        "(_is_flat(after) & ~_is_flat(before)).any()",
        "(_is_flat(after) & _is_flat(before)).any()",
        _in("eval/test_fidelity.py", "test_images_of_one_colour_are_counted_where_16_bit_has_a_picture"),
    ),
    "statistics: images resampled, not prompts": Fault(
        "eval/metrics/statistics.py",
        "            groups.setdefault(prompt, []).append(value)\n",
        "            groups.setdefault(len(groups), []).append(value)\n",
        _in("eval/test_statistics.py", "test_images_of_one_prompt_count_as_one_observation"),
    ),
    "statistics: an interval that crosses the margin": Fault(
        "eval/metrics/statistics.py",
        "    if low <= interval.low and interval.high <= high:\n",
        "    if low <= interval.low or interval.high <= high:\n",
        _in("eval/test_statistics.py", "test_equivalence"),
    ),
    "statistics: Holm's factor": Fault(
        "eval/metrics/statistics.py",
        "(len(p_values) - done) * p_values[index]",
        "len(p_values) * p_values[index]",
        _in("eval/test_statistics.py", "test_holm"),
    ),
    "verdict: the best of the published is asked": Fault(
        "eval/metrics/verdict.py",
        'return (min if better == "higher" else max)(values)',
        'return (max if better == "higher" else min)(values)',
        _in("eval/test_verdict.py", "test_margins_follow_bits_and_steps"),
    ),
    "markdown: a tag not escaped": Fault(
        "src/fluxq/base/console.py",
        'for special in "\\\\`*_[]<>|#":',
        'for special in "\\\\`*_[]|#":',
        _in("eval/test_markdown.py", "test_names_and_verdicts_cannot_inject_markup"),
    ),
    "page: HTML not escaped": Fault(
        "eval/report/report.py",
        "        autoescape=True,\n",
        "        autoescape=False,\n",
        _in("eval/test_report.py", "test_untrusted_text_stays_text"),
    ),
    "config: a save loses the kept steps": Fault(
        "src/fluxq/integrations/loading.py",
        "            return _layers_of(model, self._steps, self._runtime)\n",
        "            return _layers_of(model, None, self._runtime)\n",
        _in("runtime/test_steps.py", "test_what_is_saved_is_the_checkpoint"),
    ),
    "config: a save loses the list of steps": Fault(
        "src/fluxq/integrations/loading.py",
        "            return _layers_of(model, self._steps, self._runtime)\n",
        "            return _layers_of(model, self._steps, {})\n",
        _in(
            "jobs/test_recorded_steps.py",
            "test_saving_again_keeps_the_list_and_what_another_program_wrote_beside_it",
        ),
    ),
    "lists: computed steps put nothing right": Fault(
        "src/fluxq/runtime/skipped.py",
        "if {*fitted} > {step} and {*fitted} <= {*before} else output",
        "if False else output",
        _in("runtime/test_skip.py", "test_a_fit_multiplies_outputs_at_skipped_and_at_computed_steps"),
    ),
    "lists: a fit forgets the error of the steps before": Fault(
        "calibrate/paths.py",
        "self.effects[step] - self.effects[step, :step] @ rows[:step] if there",
        "np.eye(total)[step] * there if there",
        _in("calibrate/test_paths.py", "test_latents_after_every_step_are_as_near_as_outputs_so_far_allow"),
    ),
    "lists: what is fitted is for calls of any noise levels": Fault(
        "recipes/step_list.py",
        "        if not same or any(",
        "        if not same or all(",
        _in("calibrate/test_paths.py", "test_a_fit_is_for_calls_of_its_own_levels_and_steps"),
    ),
    "lists: what comes back of errors is not predicted": Fault(
        "calibrate/paths.py",
        "[*gains**2, 1.0]",
        "[*0 * gains, 1.0]",
        _in("calibrate/test_paths.py", "test_a_fit_is_predicted_by_the_outputs_and_as_it_was_searched"),
    ),
    "lists: a step that is kept in 16 bit is skipped": Fault(
        "src/fluxq/runtime/skipped.py",
        "            computed |= kept_in(self.pipe, total)\n",
        "",
        _in("runtime/test_skip.py", "test_steps_that_are_kept_in_16_bit_are_computed_beside_the_list"),
    ),
    "lists: that of a recipe leaves out a kept step": Fault(
        "src/fluxq/jobs/listing.py",
        "job.call, work, kept)",
        "job.call, work)",
        _in(
            "jobs/test_recorded_steps.py",
            "test_a_checkpoint_records_a_list_of_the_recipes_share_with_the_kept_steps_in_it",
        ),
    ),
    "auto --steps: plans run with every step computed": Fault(
        "src/fluxq/jobs/trials.py",
        "SkippedSteps(self.pipe, listed.steps) if listed else nullcontext()",
        "nullcontext()",
        _in("jobs/test_shares.py", "test_a_plan_runs_with_the_steps_of_its_list"),
    ),
    "auto --steps: what a list costs in quality is forgotten": Fault(
        "recipes/budget.py",
        "total(errors, choice) + lists[count], cost)",
        "total(errors, choice), cost)",
        _in("recipes/test_budget.py", "test_no_plan_of_any_number_of_steps_within_the_budget_has_less_error[0]"),
    ),
    "auto --steps: only what is chosen takes time": Fault(
        "recipes/budget.py",
        "limit * max(lists) / count - fixed)",
        "limit * max(lists) / count)",
        _in("recipes/test_budget.py", "test_no_plan_of_any_number_of_steps_within_the_budget_has_less_error[0]"),
    ),
    "auto --steps: swaps take the time of a step with all computed": Fault(
        "src/fluxq/jobs/choosing.py",
        "(search.limit / listed.steps.share if listed else search.limit)",
        "search.limit",
        _in("jobs/test_shares.py", "test_swaps_stay_within_the_time_of_the_steps_that_are_computed"),
    ),
    "caches: fewer steps compute less than the cache beside them": Fault(
        "src/fluxq/jobs/step_caches.py",
        "math.ceil(total * (share - _SLACK))",
        "math.floor(total * (share + _SLACK))",
        _in("jobs/test_step_caches.py", "test_fewer_steps_compute_no_less_and_equal_numbers_are_one_side"),
    ),
    "caches: a call of guidance counts as a step": Fault(
        "src/fluxq/runtime/step_caches.py",
        "        if timestep != self._timestep:\n",
        "        if True:\n",
        _in(
            "runtime/test_step_caches.py",
            "test_a_share_is_of_whole_steps_also_where_guidance_makes_two_calls_of_them",
        ),
    ),
    "caches: the difference to fewer steps has the sign of the other order": Fault(
        "eval/report/summary.py",
        "            return each.difference.negated\n",
        "            return each.difference\n",
        _in("eval/test_markdown.py", "test_caches_stand_beside_fewer_steps_with_the_difference_in_their_order"),
    ),
    "caches: images with one are those without": Fault(
        "eval/images/sides.py",
        '        facts["cache"] = self.cache and self.cache.facts\n',
        '        facts["cache"] = None\n',
        _in("eval/test_sides.py", "test_what_decides_bits_is_described_and_nothing_else"),
    ),
    "dtypes: a VAE of more digits is cast": Fault(
        "src/fluxq/integrations/diffusers.py",
        "        if name not in exempt and _is_exact(model, dtype):\n",
        "        if name not in exempt:\n",
        _in("integrations/test_dtypes.py", "test_a_component_with_more_digits_keeps_them"),
    ),
    "loading: tensors stay on the meta device": Fault(
        "src/fluxq/integrations/loading.py",
        "    if absent:\n",
        "    if absent and maps[0]:\n",
        _in("integrations/test_whole.py", "test_what_is_left_without_values_is_named"),
    ),
    "loading: codes that the config forgets are read": Fault(
        "src/fluxq/integrations/loading.py",
        "        elif layer is not None and is_linear(layer):\n",
        "        elif layer is not None and not is_linear(layer):\n",
        _in(
            "integrations/test_whole.py",
            "test_codes_of_a_layer_that_the_config_forgets_are_refused[transformer-one file]",
        ),
    ),
    "peft: a merged adapter's scaling ignored": Fault(
        "src/fluxq/integrations/peft.py",
        "up.weight.flatten(1) * self.scaling[name]",
        "up.weight.flatten(1)",
        _in("integrations/test_peft.py", "test_fused_adapters_with_weights_are_as_exact_as_unfused_ones"),
    ),
    "dtypes: a pipeline is cast part by part": Fault(
        "src/fluxq/integrations/diffusers.py",
        "refuse_casting(models, dtype)",
        "refuse_casting({}, dtype)",
        _in(
            "integrations/test_whole.py",
            "test_a_refused_cast_of_a_pipeline_casts_no_component[(torch.float16,)]",
        ),
    ),
    "job: calibration draws the noise of the check": Fault(
        "src/fluxq/jobs/job.py",
        "_CALIBRATION_SEEDS + self.calibration.seed",
        "self.calibration.seed",
        _in("jobs/test_job.py", "test_calibration_and_the_closing_check_draw_noise_from_seeds_that_never_meet"),
    ),
    "job: the check passes where a gate is missed": Fault(
        "src/fluxq/jobs/making.py",
        "passed=finite and not flat and not missed,",
        "passed=finite and not flat,",
        _in("commands/test_cli.py", "test_a_missed_gate_fails_but_keeps_the_checkpoint"),
    ),
    "job: memory bound ignored": Fault(
        "src/fluxq/jobs/memory.py",
        "        if self.least > limit:\n",
        "        if self.needs[self.most] > limit:\n",
        _in("integrations/test_max_memory.py", "test_too_little_is_refused_with_the_least_that_does"),
    ),
    "job: all that is free is planned with": Fault(
        "src/fluxq/jobs/memory.py",
        'nbytes <= (FREE * free if place.type == "cuda" else free)',
        "nbytes <= free",
        _in("jobs/test_placement.py", "test_a_pipeline_to_judge_fits_or_takes_turns_or_is_computed_by_the_cpu"),
    ),
    "job: LoRA files not part of its identity": Fault(
        "src/fluxq/jobs/job.py",
        '        "loras": [[lora.component, lora.digest, lora.weight] for lora in job.loras],\n',
        '        "loras": [],\n',
        _in("quantize/test_lora.py", "test_a_checkpoint_with_another_lora_is_another_checkpoint"),
    ),
    "command: a gate missed, and exit code 0": Fault(
        "src/fluxq/commands/judging.py",
        "        raise RuntimeError(f\"{output}: gate missed: {', '.join(dict.fromkeys(missed))}\")\n",
        "        click.echo(f\"{output}: gate missed: {', '.join(dict.fromkeys(missed))}\", err=True)\n",
        _in("eval/test_command.py", "test_gates_set_the_exit_code"),
    ),
    "command: errors of the work look like bad input": Fault(
        "src/fluxq/commands/session.py",
        "        self.exit_code = 1\n",
        "        self.exit_code = 2\n",
        _in("quantize/test_verify.py", "test_exit_code_1_with_every_finding_where_something_is_wrong"),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
