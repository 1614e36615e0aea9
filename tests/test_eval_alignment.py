import json
import shutil

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from fluxq import tiny
from fluxq.eval.alignment import ClipScorer

CONFIG = {
    "model_cfg": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 64, "head_width": 32, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    },
    "preprocess_cfg": {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]},
}
PROMPTS = ["a red circle", "a blue three on white", "seven"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random open_clip model as a `local-dir:` folder."""
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    save_file(open_clip.CLIP(**CONFIG["model_cfg"]).state_dict(), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def images():
    return torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_score_is_100_cos_of_the_saved_model(folder, images):  # C1, C2
    torch.manual_seed(0)
    model = open_clip.CLIP(**CONFIG["model_cfg"]).eval()  # the same random weights, never saved
    mean, std = (torch.tensor(CONFIG["preprocess_cfg"][name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        seen = model.encode_image((images / 255 - mean) / std)
        asked = model.encode_text(open_clip.get_tokenizer("ViT-B-32")(PROMPTS))
    expected = 100 * torch.nn.functional.cosine_similarity(seen, asked)
    result = ClipScorer(folder).score(images, PROMPTS, batch_size=2)
    assert result.scores == pytest.approx(expected.tolist(), abs=1e-3)
    assert min(expected).item() < 0 or max(expected) - min(expected) > 1  # the case says something
    assert result.truncated == 0 and result.network == folder.name


def test_long_prompts_are_counted(folder):  # C3
    scorer = ClipScorer(folder)
    fits = "word " * 75  # with start and end token exactly 77
    assert scorer.truncated(["word " * 200, "short", fits]) == 1
    assert scorer.truncated([fits + "word"]) == 1
    assert scorer.truncated(["word word"]) == 0


def test_embedded_model_and_its_tokenizer(images):
    scorer = ClipScorer(tiny.clip_path())
    prompts = list(tiny.PROMPTS[:3])
    result = scorer.score(images, prompts)
    assert len(result.scores) == 3 and result.truncated == 0
    assert scorer.truncated([prompts[0] + " red" * 200]) == 1


def test_missing_files_are_named(folder, tmp_path):
    shutil.copy(folder / "open_clip_config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"open_clip_model\.safetensors is missing"):
        ClipScorer(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"open_clip_config\.json is missing"):
        ClipScorer(tmp_path / "nowhere")


def test_images_and_prompts_must_match(folder, images):
    scorer = ClipScorer(folder)
    with pytest.raises(ValueError, match=r"3 torch\.uint8 images and 2 prompts"):
        scorer.score(images, PROMPTS[:2])
    with pytest.raises(ValueError, match="uint8"):
        scorer.score(images / 255, PROMPTS)
