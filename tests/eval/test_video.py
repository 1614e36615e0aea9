"""Videos: what each metric sees of a fault that is planted in them, and what of it ends up on the page."""

import base64
import hashlib
import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fluxq import tiny
from fluxq.eval.images.generate import Generated, pictures
from fluxq.eval.images.sides import Side
from fluxq.eval.metrics.distribution import FeatureNetwork
from fluxq.eval.metrics.evaluate import Candidate, measure_floor, measure_runs
from fluxq.eval.metrics.fidelity import flat_images, frame_psnr, over_frames, psnr, sqnr
from fluxq.eval.metrics.metrics import METRICS, Sample, Unmeasured, metric_rows, missing
from fluxq.eval.metrics.networks import WEIGHTS, Networks, find_networks
from fluxq.eval.metrics.pictures import wall
from fluxq.eval.metrics.schema import CheckpointSize
from fluxq.eval.metrics.video import VIDEO_FRAMES, all_frames, by_video, mean_change, temporal_psnr

COUNT, FRAMES, SIDE = 4, 9, 16
WHITE = 255**2


def videos(seed: int = 0, count: int = COUNT) -> torch.Tensor:
    """Uint8 (N, F, 3, H, W), far enough from black and white for errors to be added."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(60, 190, (count, FRAMES, 3, SIDE, SIDE), generator=draw).to(torch.uint8)


def some(made: torch.Tensor, finite: torch.Tensor | None = None) -> Generated:
    items = tuple((tiny.PROMPTS[index], 7) for index in range(len(made)))
    whole = torch.ones(len(made), dtype=torch.bool) if finite is None else finite
    return Generated(items, made, made.float() / 255, whole)


def plus(made: torch.Tensor, error: torch.Tensor | int) -> torch.Tensor:
    return (made.int() + error).clamp(0, 255).to(torch.uint8)


def noise(made: torch.Tensor, seed: int = 1) -> torch.Tensor:
    return torch.randint(-9, 10, made.shape, generator=torch.Generator().manual_seed(seed))


def value(key: str, before: torch.Tensor, after: torch.Tensor) -> float:
    found = METRICS[key].measure(Sample(some(before), some(after), Networks())).value
    assert found is not None
    return found.mean


# Formulas


def test_an_error_that_stays_is_none_in_time():
    before = videos()
    after = plus(before, 3)
    assert value("psnr", before, after) == pytest.approx(10 * math.log10(WHITE / 9))
    assert value("temporal_psnr", before, after) == math.inf and value("flicker", before, after) == 1


def test_an_error_that_alternates_counts_twice_in_time():
    before = videos()
    sign = torch.tensor([1, -1]).repeat(FRAMES)[:FRAMES].reshape(-1, 1, 1, 1)
    after = plus(before, 3 * sign)
    assert value("psnr", before, after) == pytest.approx(10 * math.log10(WHITE / 9))
    assert value("temporal_psnr", before, after) == pytest.approx(10 * math.log10(WHITE / 36))


def test_of_errors_without_memory_two_meet_in_each_change():
    before = videos()
    after = plus(before, noise(before))
    per_video = temporal_psnr(before, after)
    errors = after.double().numpy() - before.double().numpy()
    expected = [10 * math.log10(WHITE / np.square(np.diff(each, axis=0)).mean()) for each in errors]
    assert per_video.tolist() == pytest.approx(expected, rel=1e-12)
    lower = value("psnr", before, after) - value("temporal_psnr", before, after)
    assert lower == pytest.approx(10 * math.log10(2), abs=0.1)


def test_swapped_frames_are_seen_in_time_and_not_by_colour():
    before = videos()
    after = before.clone()
    after[:, [3, 4]] = before[:, [4, 3]]
    assert torch.equal(before.double().mean((1, 3, 4)), after.double().mean((1, 3, 4)))
    assert value("temporal_psnr", before, after) < 20 < value("temporal_psnr", before, plus(before, noise(before)))
    frames = frame_psnr(before, after)[0]
    assert [index for index, each in enumerate(frames) if each.isfinite()] == [3, 4]


def test_one_bad_frame_is_seen_by_the_worst_frame():
    before = videos()
    slightly = plus(before, noise(before))
    after = slightly.clone()
    after[:, 5] = 0
    assert value("worst_frame_psnr", before, slightly) - value("worst_frame_psnr", before, after) > 20
    assert 0 < value("psnr", before, slightly) - value("psnr", before, after) < 4
    per_image = METRICS["worst_frame_psnr"].measure(Sample(some(before), some(after), Networks())).per_image
    assert per_image == tuple(float(each[5]) for each in frame_psnr(before, after))


def test_flicker_is_change_over_the_16_bit_change():
    before = videos()
    assert value("flicker", before, before[:, :1].expand_as(before).clone()) == 0
    halved = (before[:, :1].int() + (before.int() - before[:, :1].int()) // 2).to(torch.uint8)
    assert value("flicker", before, halved) == pytest.approx(0.5, abs=0.01)
    expected = before.double().diff(dim=1).abs().mean((1, 2, 3, 4))
    assert torch.allclose(mean_change(before), expected)
    still = before.clone()
    still[1] = still[1, :1]
    with pytest.raises(Unmeasured, match="1 of the 4 16-bit videos stand still"):
        value("flicker", still, before)


def test_identical_frames_are_left_out_of_a_mean_and_counted():
    before = videos()
    after = before.clone()
    after[:, 1:] = plus(before[:, 1:], 3)
    found = METRICS["psnr"].measure(Sample(some(before), some(after), Networks()))
    assert found.value.mean == pytest.approx(10 * math.log10(WHITE / 9))
    assert found.notes == ("4 of 36 frames are identical and left out of their videos' means",)
    same = METRICS["psnr"].measure(Sample(some(before), some(before.clone()), Networks()))
    assert same.value.mean == math.inf and same.value.infinite == COUNT and same.notes == ()
    assert over_frames([torch.tensor([1.0, math.nan, math.inf])]).isnan().all()


def test_one_black_frame_makes_a_video_one_of_one_colour():
    before = videos()
    after = plus(before, 3)
    assert flat_images(some(before), some(after)) == 0
    after[1, 4] = 0
    after[2] = 255
    assert flat_images(some(before), some(after)) == 2
    assert flat_images(some(after), some(after)) == 0
    blue = after[0, 0].clone()
    blue[:] = torch.tensor([0, 0, 255], dtype=blue.dtype)[:, None, None]
    assert flat_images(some(before[:1, 0]), some(blue[None])) == 1


def test_a_video_of_one_frame_has_psnr_and_no_change():
    before = videos()[:, :1]
    after = plus(before, 3)
    assert value("psnr", before, after) == value("worst_frame_psnr", before, after)
    for key in ("temporal_psnr", "flicker"):
        with pytest.raises(Unmeasured, match="one frame has no change"):
            value(key, before, after)


# Frames through networks that look at pictures


@pytest.fixture(scope="module")
def networks() -> Networks:
    images, _ = tiny.held_out()
    return Networks(
        feature_network=tiny.feature_network(),
        feature_name="tiny features",
        clip=str(tiny.clip_path()),
        reference_images=images[:60],
    )


def test_frames_are_all_of_them_in_order():
    made = videos()
    seen = all_frames(made)
    assert len(seen) == COUNT * FRAMES
    assert all(torch.equal(seen[v * FRAMES + f], made[v, f]) for v in (2, 0, 3) for f in (0, 8))
    assert torch.equal(torch.stack(seen[7:11]), made.flatten(0, 1)[7:11]) and torch.equal(seen[-1], made[-1, -1])
    with pytest.raises(IndexError):
        seen[COUNT * FRAMES]
    assert all_frames(made[0]) is not None and len(all_frames(made[0])) == FRAMES  # images stay images
    assert by_video(torch.arange(6.0), 3).tolist() == [1, 4] and by_video(torch.arange(2.0), None).tolist() == [0, 1]


def test_per_frame_metrics_are_means_of_what_images_have(networks):
    frames = 3
    before = videos()[:, :frames]
    after = plus(before, noise(before))
    sample = Sample(some(before), some(after), networks)
    flat = Sample(some(before.flatten(0, 1)), some(after.flatten(0, 1)), networks)
    prompts = [prompt for prompt, _ in sample.quantized.items for _ in range(frames)]
    items = tuple((prompt, index) for index, prompt in enumerate(prompts))
    flat = Sample(replace(flat.reference, items=items), replace(flat.quantized, items=items), networks)
    for key in ("psnr", "ssim", "feature_distance", "clip_score"):
        video, image = METRICS[key].measure(sample), METRICS[key].measure(flat)
        means = torch.tensor(image.per_image).reshape(COUNT, frames).mean(1)
        assert video.per_image == pytest.approx(means.tolist(), rel=1e-5), key
        assert video.value.n == COUNT and video.value.low < video.value.mean < video.value.high
    assert METRICS["latent_sqnr"].measure(sample).per_image == tuple(sqnr(before / 255, after / 255).tolist())
    for key in ("fid", "fid_to_16bit", "kid", "cmmd"):
        video, image = METRICS[key].measure(sample), METRICS[key].measure(flat)
        assert video.value.mean == pytest.approx(image.value.mean) and video.value.n == COUNT * frames
        assert any("of frames one by one, 3 of each of 4 videos" in note for note in video.notes)
        named = [METRICS[key].figure(is_video).name for is_video in (True, False)]
        assert "frames" in named[0] and "frames" not in named[1]
    assert "12 frames to 60 held-out images" in METRICS["fid"].measure(sample).how


def test_a_plug_in_scores_frames(networks, monkeypatch):
    from fluxq.eval.metrics import metrics
    from fluxq.eval.metrics.plugins import PluginSource

    class Brightness:
        name, unit, digits, better, how = "Brightness", "", ".2f", "higher", "mean colour"

        def __init__(self, device="cpu"):
            pass

        def score(self, images, prompts):
            assert (
                len(images) == len(prompts) == COUNT * FRAMES and prompts[0] == prompts[FRAMES - 1] != prompts[FRAMES]
            )
            return [float(image.double().mean()) for image in images]

    monkeypatch.setattr(metrics, "find_plugins", lambda: {"bright": PluginSource("bright", "here", lambda: Brightness)})
    before = videos()
    found = metric_rows()["bright"].measure(Sample(some(before), some(plus(before, 3)), networks))
    assert found.per_image == pytest.approx((before.double().mean((1, 2, 3, 4)) + 3).tolist())
    assert found.change.mean == pytest.approx(3)


# The video distance


def test_its_weights_are_where_torchvision_has_them():
    from torchvision.models.video import S3D_Weights

    best = S3D_Weights.KINETICS400_V1
    assert (best.url, best.meta["min_temporal_size"]) == (WEIGHTS["video"].url, VIDEO_FRAMES)


def test_without_its_network_the_video_distance_is_said_to_be_missing():
    before = videos()
    with pytest.raises(Unmeasured, match=r"no network that looks at whole videos was given: put s3d-d76dad2f\.pth"):
        value("video_distance", before, before)


class Motion(nn.Module):
    """Mean change in time of each colour: a network that a frozen or a shuffled video does not deceive."""

    def forward(self, clips):  # (B, 3, F, H, W)
        return clips.float().diff(dim=2).abs().mean((2, 3, 4))


def test_the_video_distance_is_of_whole_videos(monkeypatch):
    monkeypatch.setattr("fluxq.eval.metrics.metrics.VIDEO_FRAMES", FRAMES)
    found = Networks()
    found.__dict__.update(
        video=object(), video_features=FeatureNetwork(Motion(), "S3D", "v", lambda v: v.movedim(0, 1))
    )
    before = videos()
    frozen = before[:, :1].expand_as(before).clone()
    same, far = (METRICS["video_distance"].measure(Sample(some(before), some(x), found)) for x in (before, frozen))
    assert same.value.mean == pytest.approx(0, abs=1e-6) and far.value.mean > 100
    assert far.value.n == COUNT and "4 videos to 4 16-bit videos" in far.how and "FVD" in far.how
    monkeypatch.setattr("fluxq.eval.metrics.metrics.VIDEO_FRAMES", FRAMES + 1)
    with pytest.raises(Unmeasured, match="at least 10 frames, the videos have 9"):
        METRICS["video_distance"].measure(Sample(some(before), some(frozen), found))


@pytest.mark.slow  # three seconds of convolutions
def test_S3D_is_torchvisions_up_to_its_last_layer(tmp_path, monkeypatch):
    from torchvision.models.video import S3D, S3D_Weights

    torch.manual_seed(0)
    whole = S3D().eval()
    for layer in whole.modules():
        if isinstance(layer, nn.Conv3d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # else nothing of a clip reaches the end
    file = tmp_path / WEIGHTS["video"].files[0]
    torch.save(whole.state_dict(), file)
    row = replace(WEIGHTS["video"], sha256=hashlib.sha256(file.read_bytes()).hexdigest()[:8])
    monkeypatch.setitem(WEIGHTS, "video", row)
    assert find_networks(Networks(), weights=tmp_path).video is None  # images have no use for it
    network = find_networks(Networks(), weights=tmp_path, is_video=True).video_features
    clip = torch.randint(0, 256, (14, 3, 40, 60), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    with torch.no_grad():
        features = network.module.eval()(network.prepare(clip)[None])
        logits = whole(S3D_Weights.KINETICS400_V1.transforms()(clip)[None])
    last = whole.classifier[1]
    assert features.shape == (1, 1024)
    assert (logits - last.bias).abs().max() > 0.1
    assert torch.allclose(features @ last.weight.flatten(1).T + last.bias, logits, rtol=1e-3, atol=1e-4)
    torch.save({"features.0.weight": torch.ones(1)}, file)
    monkeypatch.setitem(WEIGHTS, "video", replace(row, sha256=hashlib.sha256(file.read_bytes()).hexdigest()[:8]))
    with pytest.raises(ValueError, match="not the weights of torchvision's S3D"):
        _ = find_networks(Networks(), weights=tmp_path, is_video=True).video_features


def test_metrics_of_videos_are_not_asked_of_images():
    of_videos = {key for key, row in METRICS.items() if row.only_video}
    assert of_videos == {"worst_frame_psnr", "temporal_psnr", "flicker", "video_distance"}
    for key in of_videos:
        assert "this model makes images" in str(missing(key, Networks()))
    assert missing("temporal_psnr", Networks(), is_video=True) is None
    pair = [some(videos()[:, 0])] * 2
    with pytest.raises(Unmeasured, match="taken of videos"):
        METRICS["temporal_psnr"].measure(Sample(*pair, Networks()))


# A report of videos


def run_of(before: Generated, after: Generated, again: Generated | None = None):
    keys = ("psnr", "worst_frame_psnr", "temporal_psnr")
    size = CheckpointSize(
        components=("transformer",), bytes_before=4, bytes_after=1, bits_per_weight=4.5, bits_per_quantized_weight=4.5
    )
    floor = measure_floor(before, again, keys, Networks()) if again else ({}, None)
    candidate = Candidate(Side("side", "", "d"), "made", "noise", "digest", size)
    (run,) = measure_runs([candidate], before, [after], keys=keys, networks=Networks(), floor=floor)
    return run


def test_a_run_holds_psnr_by_frame_beside_its_floor():
    before = videos()
    after = plus(before, noise(before))
    after[:, 5] = plus(before[:, 5], 30)
    run = run_of(some(before), some(after), some(plus(before, 1)))
    table = torch.stack(frame_psnr(before, after))
    assert [each.mean for each in run.frames.values] == pytest.approx(table.mean(0).tolist())
    assert all(each.low < each.mean < each.high for each in run.frames.values[:5])
    assert [each.mean for each in run.frames.floor] == pytest.approx([10 * math.log10(WHITE)] * FRAMES)
    assert run.images[2].frame_psnr == tuple(table[2].tolist()) and run.noun == "video"
    assert min(range(FRAMES), key=lambda f: run.frames.values[f].mean) == 5
    assert run.metrics["psnr"].name == "PSNR to the 16-bit videos" and "mean over frames" in run.metrics["psnr"].how
    assert run.metrics["temporal_psnr"].floor.infinite == COUNT and "4 more" not in run.verdict.text
    image = run_of(some(before[:, 0]), some(after[:, 0]))
    assert image.frames is None and image.noun == "image" and image.images[0].frame_psnr == ()


def test_a_frame_that_is_not_finite_breaks_its_video_alone():
    before = videos()
    whole = torch.tensor([True, False, True, True])
    run = run_of(some(before), some(plus(before, 3), whole))
    assert run.status == "broken" and run.verdict.text.startswith("1 of 4 videos hold NaN or infinity")
    assert run.metrics["psnr"].missing == "1 of 4 quantized videos hold NaN or infinity"
    assert run.frames.values[0].n == 3 and run.images[1].values["psnr"] is None


def decoded(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def test_pictures_of_videos_show_first_middle_last_and_worst_frame():
    before = videos()
    after = plus(before, 3)
    after[2, 6] = 255 - before[2, 6]
    found = wall(some(before), some(after), psnr(before, after).tolist())
    (shown,) = found.groups.values()
    worst = shown[0]
    assert worst.index == 2 and worst.frames == (0, 4, 8, 6) and found.encoding.startswith("PNG")
    for uri, made in ((worst.reference, before), (worst.quantized, after)):
        stack = np.asarray(decoded(uri))
        assert stack.shape == (4 * SIDE + 3, SIDE, 3)
        for place, frame in enumerate(worst.frames):
            at = place * (SIDE + 1)
            assert np.array_equal(stack[at : at + SIDE], made[2, frame].permute(1, 2, 0).numpy())
    difference = np.asarray(decoded(worst.difference))[3 * (SIDE + 1) :]
    expected = (after[2, 6].int() - before[2, 6].int()).abs() * found.gain
    assert np.array_equal(difference, expected.clamp(max=255).permute(1, 2, 0).numpy())
    assert [picture.motion is not None for picture in shown] == [True, False, False, False]
    film = decoded(worst.motion)
    assert film.format == "WEBP" and film.n_frames == FRAMES and film.size == (2 * SIDE + 1, SIDE)
    film.seek(6)
    pixels = np.asarray(film.convert("RGB"))
    assert np.array_equal(pixels[:, :SIDE], before[2, 6].permute(1, 2, 0).numpy())
    assert np.array_equal(pixels[:, SIDE + 1 :], after[2, 6].permute(1, 2, 0).numpy())


def test_large_videos_are_reduced():
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (1, 30, 3, 12, 20), generator=draw).to(torch.uint8)
    large = blocks.repeat_interleave(20, 3).repeat_interleave(20, 4)  # 240 x 400
    found = wall(some(large), some(plus(large, 2)), [40.0])
    picture = found.groups["all"][0]
    assert found.shown_pixels == 320 and decoded(picture.reference).size == (320, 4 * 192 + 3 * 4)
    film = decoded(picture.motion)
    assert film.size == (2 * 192 + 2, 115) and film.n_frames == 24
    assert sum(map(len, (picture.reference, picture.quantized, picture.difference, picture.motion))) < 700_000


# What pipelines return


@pytest.mark.parametrize(
    ("output", "shape"),
    [
        ({"images": torch.zeros(2, 3, 4, 5)}, (3, 4, 5)),
        ({"image": torch.zeros(2, 3, 4, 5)}, (3, 4, 5)),
        ({"frames": torch.zeros(2, 7, 3, 4, 5)}, (7, 3, 4, 5)),
        ({"frames": torch.zeros(2, 3, 7, 4, 5)}, (7, 3, 4, 5)),  # channels before frames
        ({"frames": [torch.zeros(7, 3, 4, 5)] * 2, "audio": torch.zeros(2, 9)}, (7, 3, 4, 5)),
    ],
)
def test_pictures_of_an_output(output, shape):
    from types import SimpleNamespace

    found = pictures(SimpleNamespace(**output))
    assert len(found) == 2 and all(each.shape == shape for each in found)


@pytest.mark.parametrize("output", [{"audios": [0.5]}, {"frames": [["pil"]]}, {"images": torch.zeros(2, 4, 4, 5)}])
def test_what_is_no_picture_is_refused(output):
    from types import SimpleNamespace

    with pytest.raises(ValueError, match="SimpleNamespace"):
        pictures(SimpleNamespace(**output))
