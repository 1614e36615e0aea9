"""Tests of the parts that a job is made of."""

from dataclasses import replace

import pytest

from fluxq.base import devices
from fluxq.jobs import making


def test_calibration_and_the_closing_check_draw_noise_from_seeds_that_never_meet(tmp_path) -> None:
    job = making.job_of(making.JobOptions("tiny", "nvfp4", output=str(tmp_path / "out")))
    calibrated, checked = ({seed for _, seed in items} for items in (job.calibration_items, job.check_items))
    assert len(calibrated) == job.calibration.count and calibrated.isdisjoint(checked)


def test_text_encoders_that_could_not_be_checked_are_refused_before_any_work(tmp_path, monkeypatch) -> None:
    of = devices.package_version
    monkeypatch.setattr(devices, "package_version", lambda name: "5.14.1" if name == "transformers" else of(name))
    parts = ("transformer", "text_encoder")
    options = making.JobOptions("tiny", "fp8", output=str(tmp_path / "out"), components=parts)
    with pytest.raises(ValueError, match=r"^text_encoder: .* transformers >= 5\.21, and 5\.14\.1 is.* pass --no-check"):
        making.job_of(options)
    making.job_of(replace(options, check=False))


@pytest.mark.parametrize("profile", [None, "rtn"])
def test_a_checkpoint_of_blocks_that_were_fitted_side_by_side_is_another(profile, tmp_path) -> None:
    """Unless nothing is fitted at all."""
    options = making.JobOptions("tiny", "nvfp4", profile, str(tmp_path / "out"))
    one, two = (making.job_of(replace(options, parallel_blocks=parallel)) for parallel in (False, True))
    assert (one.identity == two.identity) is (profile == "rtn")
