"""The passport's arithmetic: sketches of latents, and the rule that says whether a machine repeats them."""

import base64
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fluxq.eval.gate.passport import (
    FINEST,
    SKETCH,
    NamedImage,
    Passport,
    _drawn,
    changed_parts,
    floor_of,
    named_images,
    nearness,
    read_passport,
    write_passport,
)

ITEMS = [(f"prompt {index}", index) for index in range(8)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def away(latents: Tensor, db: float, seed: int = 1) -> Tensor:
    """Latents at this SQNR of others."""
    noise = drawn(*latents.shape, seed=seed) + 1  # of one sign, as signs of the sketch have to undo
    return latents + noise * float(latents.norm() / noise.norm()) * 10 ** (-db / 20)


def passport(latents: list[Tensor], floor: tuple[float | None, ...] = (40.0, 41.0)) -> Passport:
    return Passport(
        fluxq="0",
        created="today",
        by="eval",
        checkpoint="c",
        digests={"transformer": "t", "vae": "v"},
        metrics={},
        units={},
        gates=(),
        call={},
        batch_size=4,
        dtype="bfloat16",
        device="cpu",
        machine="one",
        versions={},
        shape=tuple(latents[0].shape),
        images=named_images(ITEMS[: len(latents)], latents),
        floor=floor,
        floor_run={},
    )


def test_a_sketch_tells_the_sqnr_of_large_latents_and_is_the_same_on_every_machine() -> None:
    assert [int(value) for value in _drawn(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # SplitMix64 from 0
    for numbers, allowed in ((SKETCH, 1e-4), (64 * 4096, 0.19 * 3)):
        latents = drawn(numbers)
        made = NamedImage.of("p", 0, latents)
        assert len(made.numbers) == SKETCH
        for db in (10.0, 30.0, 60.0):
            assert abs(made.sqnr(NamedImage.of("p", 0, away(latents, db))) - db) < allowed
        assert made.sqnr(NamedImage.of("p", 0, latents.clone())) == math.inf
    assert math.isnan(made.sqnr(NamedImage.of("p", 0, latents[:9])))


@pytest.mark.parametrize(
    ("db", "floor", "verdict"),
    [
        ([math.inf] * 8, (40.0,), "bit for bit"),
        ([40.0] * 8, (40.0, 41.0), "within the floor"),
        ([math.inf] * 7 + [95.0], (None,), "within the floor"),
        ([38.0, 42.0] * 4, (40.0, 41.0), "within the floor"),
        ([30.0] * 8, (40.0, 41.0), "not"),
        ([50.0] * 8, (None, None), "not"),
        ([math.nan] * 8, (40.0,), "not"),
        ([20.0, 60.0] * 4, (40.0, 41.0), "cannot tell"),
        ([41.0, math.inf, 39.5, 39.2] * 2, (41.0, 41.9), "within the floor"),  # as on the CPU of another vendor
        ([math.inf, 33.0] * 4, (41.0,), "cannot tell"),
    ],
)
def test_the_gates_rule_says_whether_a_machine_repeats_a_passport(db, floor, verdict) -> None:
    latents = [drawn(16, 16, seed=seed) for seed in range(8)]
    now = [
        each if math.isinf(at) else each[:2] if math.isnan(at) else away(each, at)
        for each, at in zip(latents, db, strict=True)
    ]
    found = nearness(passport(latents, floor), named_images(ITEMS, now))
    assert found.verdict == verdict and found.same == db.count(math.inf)


def test_a_difference_that_the_sketch_does_not_show_is_not_the_same_bits() -> None:
    latents = [drawn(64, 64, seed=index) for index in range(4)]
    moved = latents[0].clone()
    moved[0, 0] = torch.nextafter(moved[0, 0], torch.tensor(9.0))
    near = nearness(passport(latents), named_images(ITEMS[:4], [moved, *latents[1:]]))
    assert near.verdict == "within the floor" and near.same == 3 and near.sqnr[0] == FINEST
    plain, signed = (named_images(ITEMS[:1], [torch.tensor([zero, 1.0])])[0] for zero in (0.0, -0.0))
    assert plain.sqnr(signed) == FINEST


def test_a_floor_is_that_of_the_images_that_were_made_again() -> None:
    latents = [drawn(16, 16, seed=seed) for seed in range(3)]
    again = named_images(ITEMS[:2], [away(latents[0], 40.0), latents[1]])
    first, second = floor_of(named_images(ITEMS[:3], latents), again)
    assert second is None and first == pytest.approx(40.0, abs=1e-3)
    with pytest.raises(ValueError, match="NaN or infinity"):
        named_images(ITEMS[:1], [latents[0] * math.nan])


def test_a_passport_is_read_as_it_was_written_and_refused_by_name_where_it_is_damaged(tmp_path: Path) -> None:
    written = passport([drawn(16, 16, seed=seed) for seed in range(8)])
    write_passport(tmp_path, written)
    file = tmp_path / "passport.json"
    text = file.read_text(encoding="utf-8")
    assert read_passport(file) == written
    for change, said in (
        (("prompt 3", "prompt 9"), "changed since fluxq wrote it"),
        (('"kind": "fluxq passport"', '"kind": "fluxq speed"'), "no passport of fluxq"),
        (("{", "["), "not valid JSON"),
    ):
        file.write_text(text.replace(*change, 1), encoding="utf-8")
        with pytest.raises(ValueError, match=f"passport.json: {said}"):
            read_passport(file)
    bad = np.full(256, np.nan, "<f4").tobytes()
    image = written.images[0].model_copy(update={"sketch": base64.b64encode(bad).decode()})
    for update, said in (
        ({"images": (image,)}, "sketch of seed 0"),
        ({"batch_size": 0}, "batch_size"),
        ({"schema_version": 2}, "another version of fluxq"),
    ):
        write_passport(tmp_path, written.model_copy(update=update))
        with pytest.raises(ValueError, match=said):
            read_passport(file)


def test_what_changed_in_a_pipeline_is_named() -> None:
    written = passport([drawn(4, 4)])
    assert changed_parts(written, "c", {"transformer": "t", "vae": "v"}) == []
    assert changed_parts(written, "d", {"transformer": "x", "vae": "v"}) == ["transformer"]
    assert changed_parts(written, "d", {"transformer": "t"}) == ["vae"]
    assert changed_parts(written, "d", {"transformer": "t", "vae": "v"}) == ["files of its scheduler or tokenizers"]
