from types import SimpleNamespace

import pytest
import torch
from diffusers.image_processor import VaeImageProcessor

from fluxq import tiny
from fluxq.eval.images.generate import generate, generate_batch, images_digest, to_uint8
from fluxq.eval.images.protocols import items_of

CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 2}


class FakePipeline:
    """Answers with the given images and latents, batch by batch, the way diffusers does."""

    device = torch.device("cpu")

    def __init__(self, images, latents):
        self.images, self.latents, self.at = images, latents, 0

    def __call__(self, prompt, generator, output_type, callback_on_step_end, **call):
        part = slice(self.at, self.at + len(prompt))
        self.at += len(prompt)
        callback_on_step_end(self, 0, 0, {"latents": self.latents[part]})
        return SimpleNamespace(images=self.images[part])


class FakeVideoPipeline(FakePipeline):
    """The same with videos."""

    def __call__(self, prompt, generator, output_type, callback_on_step_end, **call):
        made = super().__call__(prompt, generator, output_type, callback_on_step_end)
        return SimpleNamespace(frames=made.images)


@pytest.fixture(scope="module")
def pipe():
    return tiny.load("float32")


def test_bytes_are_those_of_pil():
    steps = torch.arange(0, 256 * 8, dtype=torch.float32) / (255 * 8)  # every level, every half, and between
    image = steps.clamp(max=1).reshape(1, 1, 32, 64).expand(1, 3, 32, 64)
    (picture,) = VaeImageProcessor().postprocess(image * 2 - 1, output_type="pil")
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(32, 64, 3).permute(2, 0, 1)
    exact = (image * 2 - 1) * 0.5 + 0.5  # postprocess's own arithmetic
    assert torch.equal(to_uint8(exact[0]), pixels)
    assert not torch.equal((exact[0] * 255).to(torch.uint8), pixels)


def test_images_are_the_pipelines_own_in_any_batch_size(pipe):
    items = items_of(tiny.PROMPTS, 3, first_seed=5)
    made = generate(pipe, items, CALL, batch_size=2)
    assert made.images.shape == (3, 3, 16, 16) and made.images.dtype == torch.uint8
    assert made.latents.dtype == torch.float32 and len(made.latents) == 3
    assert made.finite.all() and made.items == tuple(items)
    for index, (prompt, seed) in enumerate(items):
        alone = pipe([prompt], generator=torch.Generator("cpu").manual_seed(seed), output_type="pil", **CALL).images[0]
        pixels = torch.frombuffer(bytearray(alone.tobytes()), dtype=torch.uint8).view(16, 16, 3).permute(2, 0, 1)
        assert (made.images[index].int() - pixels.int()).abs().max() <= 1  # a batch rounds its sums in another order


def test_a_batch_alone_gives_the_bytes_that_it_gives_among_others(pipe):
    items = items_of(tiny.PROMPTS, 5, first_seed=5)
    made = generate(pipe, items, CALL, batch_size=2)
    last, middle = generate_batch(pipe, items[4:], CALL), generate_batch(pipe, items[2:4], CALL)
    assert torch.equal(made.latents[2:], torch.cat([middle.latents, last.latents]))
    assert torch.equal(made.images[2:], torch.cat([middle.images, last.images]))


def test_videos_are_kept_whole_and_one_bad_number_in_a_frame_is_found():
    frames, latents = torch.rand(3, 4, 3, 8, 8), torch.randn(3, 5, 6)
    frames[1, 2, 0, 0, 0] = torch.nan
    made = generate(FakeVideoPipeline(frames, latents), items_of(["x"], 3, first_seed=0), {}, batch_size=2)
    assert made.images.shape == (3, 4, 3, 8, 8) and made.frames == 4 and made.finite.tolist() == [True, False, True]
    assert torch.equal(made.images[2, 3], to_uint8(frames[2, 3]))
    images = generate(FakePipeline(frames[:, 0], latents), items_of(["x"], 3, first_seed=0), {}, batch_size=2)
    assert images.frames is None


def test_short_videos_share_a_call_and_long_ones_do_not():
    sizes = []

    class Counting(FakeVideoPipeline):
        def __call__(self, prompt, generator, output_type, callback_on_step_end, **call):
            sizes.append(len(prompt))
            return super().__call__(prompt, generator, output_type, callback_on_step_end)

    for argument, frames in (("num_frames", 4), ("num_frames", 8), ("video_length", 16)):
        pipe = Counting(torch.rand(4, 1, 3, 8, 8), torch.randn(4, 5))
        generate(pipe, items_of(["x"], 4, first_seed=0), {"height": 256, "width": 512, argument: frames})
    assert sizes == [2, 2, *[1] * 8]


def test_the_digest_is_of_shape_and_pixels_and_reads_one_image_at_a_time():
    images = torch.arange(2 * 3 * 4 * 8).reshape(2, 3, 4, 8).to(torch.uint8)
    assert images_digest(images) == images_digest(list(images))
    assert images_digest(images) != images_digest(images.reshape(2, 3, 8, 4))
    assert images_digest(images) != images_digest(images.flip(0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_image_is_seen_before_it_becomes_bytes(bad):
    images, latents = torch.rand(4, 3, 8, 8), torch.randn(4, 5, 6)
    images[1, 0, 0, 0] = bad
    latents[3, 2, 2] = bad
    made = generate(FakePipeline(images, latents), items_of(["x"], 4, first_seed=0), {}, batch_size=3)
    assert made.finite.tolist() == [True, False, True, False]


def test_nothing_to_generate_is_an_error(pipe):
    with pytest.raises(ValueError, match="empty"):
        generate(pipe, [], CALL)
