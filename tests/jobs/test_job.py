"""Tests of the parts that a job is made of."""

from fluxq.jobs import making


def test_calibration_and_the_closing_check_draw_noise_from_seeds_that_never_meet(tmp_path) -> None:
    job = making.job_of(making.JobOptions("tiny", "nvfp4", output=str(tmp_path / "out")))
    calibrated, checked = ({seed for _, seed in items} for items in (job.calibration_items, job.check_items))
    assert len(calibrated) == job.calibration.count and calibrated.isdisjoint(checked)
