import json
import shutil
import time

import huggingface_hub
import open_clip
import pytest
import torch
from safetensors.torch import save_file

from fluxq import tiny
from fluxq.base.files import sha256_file
from fluxq.eval.metrics.alignment import ClipScorer

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


def scored(scorer, images, prompts, batch_size=64):
    return scorer.align(scorer.embed(images, batch_size), prompts, batch_size)


@pytest.mark.slow
def test_C2_score_is_100_cos_of_the_saved_model(folder, images):
    torch.manual_seed(0)
    model = open_clip.CLIP(**CONFIG["model_cfg"]).eval()  # the same random weights, never saved
    mean, std = (torch.tensor(CONFIG["preprocess_cfg"][name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        seen = model.encode_image((images / 255 - mean) / std)
        asked = model.encode_text(open_clip.get_tokenizer("ViT-B-32")(PROMPTS))
    expected = 100 * torch.nn.functional.cosine_similarity(seen, asked)
    scorer = ClipScorer(folder)
    assert scored(scorer, images, PROMPTS, batch_size=2) == pytest.approx(expected.tolist(), abs=1e-3)
    assert min(expected).item() < 0 or max(expected) - min(expected) > 1  # the case says something
    assert scorer.truncated(PROMPTS) == 0 and scorer.network == folder.name and scorer.warnings == ()


def test_C2_scores_are_per_pair_and_not_clamped(folder, images):
    scorer = ClipScorer(folder)
    seen = scorer.embed(images[:1])
    asked = scorer.model.encode_text(scorer.tokenizer(PROMPTS[:1]), normalize=True).detach()
    embeddings = torch.cat([asked, -asked, seen])
    assert scorer.align(embeddings, PROMPTS[:1] * 3)[:2] == pytest.approx((100, -100), abs=1e-4)
    assert scored(scorer, list(images), PROMPTS) == scored(scorer, images, PROMPTS)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """One random model as a state dict in both kinds of file and as a folder, its configuration known to open_clip."""
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "small", CONFIG["model_cfg"])
    torch.manual_seed(1)
    state = open_clip.CLIP(**CONFIG["model_cfg"]).state_dict()
    save_file(state, tmp_path / "clip.safetensors")
    torch.save(state, tmp_path / "clip.pt")
    (tmp_path / "folder").mkdir()
    shutil.copy(tmp_path / "clip.safetensors", tmp_path / "folder" / "open_clip_model.safetensors")
    (tmp_path / "folder" / "open_clip_config.json").write_text(json.dumps({"model_cfg": CONFIG["model_cfg"]}))
    return tmp_path


@pytest.mark.slow
def test_C1_file_and_folder_give_the_same_bits(files, images):
    digest = sha256_file(files / "clip.pt")
    sources = (f"small={files / 'clip.safetensors'}", f"small={files / 'clip.pt'}#{digest[:12]}", files / "folder")
    scorers = [ClipScorer(source) for source in sources]
    found = [scored(scorer, images, PROMPTS) for scorer in scorers]
    assert found[0] == found[1] == found[2]
    assert [scorer.network for scorer in scorers] == ["small, clip.safetensors", "small, clip.pt", "folder"]


def test_a_pickle_needs_its_published_hash(files):
    with pytest.raises(ValueError, match=r"clip\.pt: a pickled file can hold more than weights"):
        ClipScorer(f"small={files / 'clip.pt'}")
    with pytest.raises(ValueError, match=r"clip\.pt: its SHA-256 is .{16}…, not 0123abcd"):
        ClipScorer(f"small={files / 'clip.pt'}#0123abcd")
    with pytest.raises(ValueError, match="a pickled file"):
        ClipScorer(f"small={files / 'clip.pt'}#0")


@pytest.mark.slow
def test_C4_openai_weights_without_quickgelu_are_warned_of(files, monkeypatch):
    openai = files / "vit_small.openai.safetensors"
    shutil.copy(files / "clip.safetensors", openai)
    (doubt,) = ClipScorer(f"small={openai}").warnings
    assert "trained with QuickGELU" in doubt and "-quickgelu configuration" in doubt
    monkeypatch.setitem(
        open_clip.factory._MODEL_CONFIGS, "small-quickgelu", {**CONFIG["model_cfg"], "quick_gelu": True}
    )
    assert ClipScorer(f"small-quickgelu={openai}").warnings == ()
    (files / "folder").rename(files / "openai-clip")
    assert "QuickGELU" in ClipScorer(files / "openai-clip").warnings[0]


@pytest.mark.slow
def test_a_repository_of_the_hub_is_read_from_its_cache(files, images, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(files / "hub"))
    snapshot = files / "hub" / "models--someone--clip" / "snapshots" / ("0" * 40)
    shutil.copytree(files / "folder", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    found = ClipScorer("hf-hub:someone/clip")
    assert scored(found, images, PROMPTS) == scored(ClipScorer(files / "folder"), images, PROMPTS)
    assert found.network == "someone/clip"
    (snapshot / "open_clip_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"someone/clip holds no open_clip_model\.safetensors"):
        ClipScorer("hf-hub:someone/clip")


@pytest.mark.parametrize("source", ["ViT-B-32-quickgelu/openai", "hf-hub:someone/nothing"])
def test_weights_that_are_missing_offline_are_named_at_once(source, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    start = time.process_time()
    with pytest.raises(FileNotFoundError, match=r"neither in the hub's cache nor to be had: go online, or download"):
        ClipScorer(source)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "source, error, message",
    [
        ("nowhere", FileNotFoundError, "nowhere: no such folder; give one that holds"),
        ("/nowhere/at/all", FileNotFoundError, "no such folder"),
        ("ViT-B-99/openai", ValueError, "no configuration 'ViT-B-99'"),
        ("ViT-B-32/opanai", ValueError, "no weights 'opanai' of ViT-B-32; known: openai"),
        ("ViT-B-32=nowhere.safetensors", FileNotFoundError, r"nowhere\.safetensors do not exist"),
    ],
)
def test_unknown_sources_are_named(source, error, message):
    with pytest.raises(error, match=message):
        ClipScorer(source)


def test_C3_long_prompts_are_counted(folder):
    scorer = ClipScorer(folder)
    fits = "word " * 75  # with start and end token exactly 77
    assert scorer.truncated(["word " * 200, "short", fits]) == 1
    assert scorer.truncated([fits + "word"]) == 1
    assert scorer.truncated(["word word"]) == 0


def test_embedded_model_and_its_tokenizer(images):
    scorer = ClipScorer(tiny.clip_path())
    prompts = list(tiny.PROMPTS[:3])
    result = scored(scorer, images, prompts)
    assert len(result) == 3 and scorer.truncated(prompts) == 0
    assert scorer.truncated([prompts[0] + " red" * 200]) == 1


def test_missing_files_are_named(folder, tmp_path):
    shutil.copy(folder / "open_clip_config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"open_clip_model\.safetensors is missing"):
        ClipScorer(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"open_clip_config\.json is missing"):
        ClipScorer(tmp_path / "empty")


def test_images_and_prompts_must_match(folder, images):
    scorer = ClipScorer(folder)
    with pytest.raises(ValueError, match="a prompt for each image, got 3 and 2"):
        scored(scorer, images, PROMPTS[:2])
    with pytest.raises(ValueError, match="uint8"):
        scored(scorer, images / 255, PROMPTS)


@pytest.mark.slow
def test_C1_a_real_configuration_saved_and_loaded(tmp_path):
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model, _, preprocess = open_clip.create_model_and_transforms("ViT-B-32", pretrained=None)
    save_file(model.state_dict(), tmp_path / "b32.safetensors")
    scorer = ClipScorer(f"ViT-B-32={tmp_path / 'b32.safetensors'}")
    found = scored(scorer, images, PROMPTS[:2])
    scorer.model, scorer.preprocess = model.eval(), preprocess
    assert scored(scorer, images, PROMPTS[:2]) == found
