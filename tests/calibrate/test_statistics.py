"""Statistics: they merge in any order, are saved as the same bytes, and refuse what does not belong together."""

import json
import os
from itertools import pairwise
from pathlib import Path

import forked
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fluxq.base.files import sha256_json
from fluxq.calibrate.statistics import GroupSums, Statistics

BINS, K = 3, 5
TRAJECTORY = {"model": "m", "items": [["a prompt", 0]], "call": {"height": 16}, "sigmas": [1.0, 0.5]}


def sums_of(parts) -> GroupSums:
    sums = GroupSums.zeros(BINS, K)
    for index, x in parts:
        sums.add(index, x)
    return sums


def some_parts(seed: int, count: int):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-3, 3, K)
    return [(i % BINS, torch.randn(4 + i, K, generator=generator) * scale + 0.1) for i in range(count)]


def statistics(items=(("a prompt", 0),), seed=0, **changed) -> Statistics:
    trajectory = {**TRAJECTORY, "items": [list(item) for item in items], **changed}
    groups = {"blocks.0.to_q": sums_of(some_parts(seed, 6)), "blocks.0.proj": sums_of(some_parts(seed + 1, 6))}
    return Statistics(groups, trajectory, sha256_json(trajectory))


def assert_close(one: GroupSums, other: GroupSums, terms: torch.Tensor) -> None:
    """amax and count alike to the bit, sums within 1e-12 of what was added up."""
    assert torch.equal(one.amax, other.amax) and torch.equal(one.count, other.count)
    assert ((one.sum - other.sum).abs() <= 1e-12 * terms.abs().sum(0)).all()
    torch.testing.assert_close(one.sum_of_squares, other.sum_of_squares, rtol=1e-12, atol=0)


def test_sums_are_those_of_all_tokens():
    parts = some_parts(0, 7)
    sums = sums_of(parts)
    for index in range(BINS):
        x = torch.cat([part for i, part in parts if i == index]).double()
        assert torch.equal(sums.amax[index], x.abs().amax(0).float())
        assert sums.count[index] == len(x)
        torch.testing.assert_close(sums.sum[index], x.sum(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sums.sum_of_squares[index], x.square().sum(0), rtol=1e-12, atol=0)
    x = torch.cat([part for _, part in parts]).double()
    torch.testing.assert_close(sums.mean, x.mean(0), rtol=1e-12, atol=1e-12)
    dtypes = (sums.amax.dtype, sums.sum.dtype, sums.sum_of_squares.dtype, sums.count.dtype)
    assert dtypes == (torch.float32, torch.float64, torch.float64, torch.int64)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(9)), st.lists(st.integers(1, 8), max_size=4), st.randoms(use_true_random=False))
def test_any_order_and_sharding_agree(order, cuts, random):
    parts = some_parts(3, 9)
    whole = sums_of(parts)
    bounds = [0, *sorted(set(cuts)), 9]
    shards = [sums_of(parts[i] for i in order[a:b]) for a, b in pairwise(bounds)]
    random.shuffle(shards)
    merged = shards[0]
    for shard in shards[1:]:
        merged = merged.merge(shard)
    assert_close(merged, whole, torch.cat([part for _, part in parts]).double())


def test_merging_changes_neither_side():
    one, other = sums_of(some_parts(0, 3)), sums_of(some_parts(1, 3))
    before = one.sum.clone(), other.amax.clone()
    one.merge(other)
    assert torch.equal(one.sum, before[0]) and torch.equal(other.amax, before[1])


def test_amax_is_exact_for_16_bit_activations():
    x = torch.tensor([[3.140625, -1e-38, 0.0, -65280.0, 1e-3]], dtype=torch.bfloat16)
    assert torch.equal(sums_of([(0, x)]).amax[0], x[0].abs().float())


def test_merged_statistics_hold_the_images_of_both():
    one, other = statistics(items=[("a", 0)]), statistics(items=[("b", 1)], seed=5)
    merged = one.merge(other)
    assert merged.trajectory == {**TRAJECTORY, "items": [["a", 0], ["b", 1]]}
    assert merged.digest == sha256_json(merged.trajectory) and merged.digest not in (one.digest, other.digest)
    name = "blocks.0.to_q"
    assert torch.equal(merged.groups[name].count, one.groups[name].count + other.groups[name].count)
    assert merged.amax(name) == torch.maximum(one.amax(name), other.amax(name))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": "other"}, "model"),
        ({"call": {"height": 32}}, "call"),
        ({"sigmas": [1.0, 0.25], "model": "n"}, "model, sigmas"),
        ({"extra": 1}, "extra"),
    ],
)
def test_other_trajectories_do_not_merge(changed, named):
    with pytest.raises(ValueError, match=f"cannot be merged: they differ in {named}$"):
        statistics().merge(statistics(items=[("b", 1)], **changed))


def test_images_of_other_sizes_merge_under_the_sigmas_of_the_first():
    """Their noise levels are shifted; of images without arguments of their own that would be another schedule."""
    wide = [("b", 1, {"width": 32})]
    merged = statistics().merge(statistics(items=wide, sigmas=[1.0, 0.7]))
    assert merged.trajectory == {**TRAJECTORY, "items": [["a prompt", 0], ["b", 1, {"width": 32}]]}
    with pytest.raises(ValueError, match=r"they differ in sigmas$"):
        statistics(items=wide).merge(statistics(items=[("c", 2, {"width": 32})], sigmas=[1.0, 0.7]))
    with pytest.raises(ValueError, match=r"they differ in sigmas$"):
        statistics().merge(statistics(items=[("b", 1)], sigmas=[1.0, 0.7]))


def test_other_groups_do_not_merge():
    few = statistics(items=[("b", 1)])
    few = Statistics({"blocks.0.to_q": few.groups["blocks.0.to_q"]}, few.trajectory, few.digest)
    with pytest.raises(ValueError, match="cannot be merged: they differ in the groups seen"):
        statistics().merge(few)


def test_a_group_that_was_not_seen_is_named():
    with pytest.raises(ValueError, match=r"nothing about the input of blocks\.9\.to_q: calibrate again"):
        statistics().amax("blocks.9.to_q")


def test_a_file_holds_everything(tmp_path):
    made = statistics()
    made.save(tmp_path / "s.safetensors")
    read = Statistics.load(tmp_path / "s.safetensors")
    assert (read.trajectory, read.digest, set(read.groups)) == (made.trajectory, made.digest, set(made.groups))
    for name, sums in made.groups.items():
        for field in ("amax", "sum", "sum_of_squares", "count"):
            was, now = getattr(sums, field), getattr(read.groups[name], field)
            assert torch.equal(was, now) and was.dtype == now.dtype
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]
    assert (tmp_path / "s.safetensors").stat().st_mode & 0o444 == 0o444 & ~_umask()


def save_merged(path):
    statistics(items=[("a", 0)]).merge(statistics(items=[("b", 1)], seed=5)).save(path)


SAVE = """
import sys, pathlib
sys.path.insert(0, sys.argv[2])
from test_statistics import save_merged
save_merged(pathlib.Path(sys.argv[1]))
"""


def test_the_same_split_gives_the_same_bytes_in_two_processes(tmp_path):
    """This one and another, whose hashes of texts have another seed."""
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    save_merged(files[0])
    forked.run("-c", SAVE, files[1], Path(__file__).parent).check_returncode()
    assert files[0].read_bytes() == files[1].read_bytes()
    Statistics.load(files[0])


def resave(path, header=None, drop=(), change=lambda header: None):
    with safe_open(path, framework="pt") as stream:
        read = json.loads(stream.metadata()["fluxq_statistics"])
        tensors = {key: stream.get_tensor(key) for key in stream.keys() if key not in drop}
    change(read)
    save_file(tensors, path, metadata={"fluxq_statistics": json.dumps(read) if header is None else header})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"change": lambda h: h["trajectory"]["items"].append(["x", 2])}, "trajectory does not match its hash"),
        ({"change": lambda h: h["trajectory"].update(model="other")}, "trajectory does not match its hash"),
        ({"change": lambda h: h.update(digest="0" * 64)}, "trajectory does not match its hash"),
        ({"change": lambda h: h.pop("trajectory")}, "trajectory does not match its hash"),
        ({"change": lambda h: h.update(version=2)}, "not a statistics file of this version"),
        ({"header": "{}"}, "not a statistics file of this version"),
        ({"header": "not json"}, "not a statistics file of this version"),
        ({"header": "[1]"}, "not a statistics file of this version"),
        ({"drop": ("blocks.0.proj/count",)}, "tensors are missing"),
    ],
)
def test_a_changed_file_is_refused(tmp_path, damage, message):
    path = tmp_path / "s.safetensors"
    statistics().save(path)
    resave(path, **damage)
    with pytest.raises(ValueError, match=rf"s\.safetensors: .*{message}.*`fluxq calibrate`"):
        Statistics.load(path)


def test_a_file_of_another_kind_a_cut_one_and_none_are_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="not a statistics file"):
        Statistics.load(path)
    statistics().save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"s\.safetensors: truncated or damaged safetensors file"):
        Statistics.load(path)
    with pytest.raises(FileNotFoundError, match="`fluxq calibrate` writes one"):
        Statistics.load(tmp_path / "gone")


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@pytest.mark.parametrize("field", ["amax", "sum"])
def test_numbers_that_no_activation_gives_are_refused(tmp_path, statistics_file, field):
    stored = load_file(statistics_file)
    name = next(key for key in sorted(stored) if key.endswith(f"/{field}"))
    stored[name][0, 0] = torch.nan
    with safe_open(statistics_file, framework="pt") as stream:
        save_file(stored, tmp_path / "bad.safetensors", metadata=stream.metadata())
    with pytest.raises(ValueError, match="holds numbers that no activation gives"):
        Statistics.load(tmp_path / "bad.safetensors")


def test_the_content_digest_covers_the_numbers(statistics_file):
    first, second = Statistics.load(statistics_file), Statistics.load(statistics_file)
    assert first.content_digest == second.content_digest
    next(iter(second.groups.values())).amax[0, 0] += 1
    assert first.digest == second.digest and first.content_digest != second.content_digest


def test_a_changed_number_is_refused(tmp_path, statistics_file):
    stored, path = load_file(statistics_file), tmp_path / "other.safetensors"
    next(tensor for name, tensor in sorted(stored.items()) if name.endswith("/amax"))[0, 0] += 1
    with safe_open(statistics_file, framework="pt") as stream:
        header = stream.metadata()
    save_file(stored, path, metadata=header)
    with pytest.raises(ValueError, match=r"other\.safetensors: damaged since it was written; run `fluxq calibrate`"):
        Statistics.load(path)
    said = json.loads(header["fluxq_statistics"])  # as it was before it named its content
    assert said.pop("content")
    save_file(stored, path, metadata={"fluxq_statistics": json.dumps(said)})
    Statistics.load(path)
