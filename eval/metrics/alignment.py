"""CLIP score: 100 × the cosine between an image and its prompt in CLIP's common space (Hessel et al., 2021).

It says whether images still show what was asked for, hardly how well; see `fidelity` for drift. Scores are per image
and not clamped at 0, as some tools do. Every model comes from open_clip, in safetensors; a pickled file is read only
if its SHA-256 is given, and then as plain tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxq.base.files import read_json, sha256_file
from fluxq.eval.images.generate import Images, as_picture

CONFIG = "open_clip_config.json"
WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors")
Located = tuple[str, str | None, str, tuple[str, ...]]  # see `locate`


class ClipScorer:
    """An open_clip model, from one of

        a folder                          `open_clip_config.json`, safetensors weights, tokenizer files
        CONFIG=FILE.safetensors           a configuration of open_clip's and its weights: ViT-B-32=clip.safetensors
        CONFIG=FILE.pt#SHA256             the same pickled; at least 8 hexadecimal digits of the file's SHA-256
        CONFIG/TAG                        a row of open_clip's table, from the hub: ViT-B-32-quickgelu/openai
        hf-hub:OWNER/NAME                 a repository of the hub that holds such a folder

    Raises FileNotFoundError naming what is missing, ValueError for another hash or an unknown name; random weights
    never stand in.
    """

    def __init__(self, source: Path | str, device: str = "cpu") -> None:
        name, weights, self.network, self.warnings = locate(str(source))
        import open_clip

        model: Any = open_clip.create_model_from_pretrained(name, pretrained=weights, device=device)
        self.model, self.preprocess, self.device = model[0].eval(), model[1], device
        self.tokenizer: Any = open_clip.get_tokenizer(name)

    @torch.no_grad()
    def embed(self, images: Images, batch_size: int = 64) -> Tensor:
        """Return normalized embeddings (N, D) of uint8 images (3, H, W), float32."""
        embeddings = []
        for start in range(0, len(images), batch_size):
            batch = [images[i] for i in range(start, min(start + batch_size, len(images)))]
            if any(image.dtype != torch.uint8 for image in batch):
                raise ValueError(f"CLIP score needs uint8 images, got {batch[0].dtype}")
            prepared = torch.stack([self.preprocess(as_picture(image)) for image in batch])
            embeddings.append(self.model.encode_image(prepared.to(self.device), normalize=True).float().cpu())  # (B, D)
        return torch.cat(embeddings)

    @torch.no_grad()
    def align(self, embeddings: Tensor, prompts: Sequence[str], batch_size: int = 64) -> tuple[float, ...]:
        """Return 100 × cosine of each image's embedding (N, D) with its prompt's, -100 to 100, not clamped."""
        if len(embeddings) != len(prompts):
            raise ValueError(f"CLIP score needs a prompt for each image, got {len(embeddings)} and {len(prompts)}")
        scores: list[float] = []
        for start in range(0, len(prompts), batch_size):
            tokens = self.tokenizer(list(prompts[start : start + batch_size]))  # (B, context)
            text_embeddings = self.model.encode_text(tokens.to(self.device), normalize=True).cpu()  # (B, D)
            image_embeddings = embeddings[start : start + batch_size]
            scores += (100 * (image_embeddings.double() * text_embeddings.double()).sum(-1)).tolist()
        return tuple(scores)

    def truncated(self, prompts: Sequence[str]) -> int:
        """Return the number of prompts that are longer than the text encoder reads, so that their ends do not count."""
        context = self.tokenizer.context_length
        room = context + max(len(text.encode()) for text in prompts)  # a token a byte at most: the last is padding
        tokens = self.tokenizer(list(prompts), context_length=room)  # (N, room)
        return int((tokens[:, context:] != tokens[:, -1:]).any(1).sum())


def locate(source: str) -> Located:
    """Find and check all files of a `ClipScorer` before anything is built; raises as it does.

    Returns the names of its model and weights for open_clip, its name in reports, and warnings that make its scores
    doubtful.
    """
    if Path(source).is_dir():
        return _folder(Path(source), Path(source).name)
    if source.startswith("hf-hub:"):
        return _folder(_download(source.removeprefix("hf-hub:")), source.removeprefix("hf-hub:"))
    config, separator, rest = source.partition("=")
    if separator:
        return _file(config, rest)
    config, separator, tag = source.rpartition("/")
    if separator and not Path(source).is_absolute() and not source.startswith("."):
        return _tag(config, tag)
    raise FileNotFoundError(
        f"CLIP model {source}: no such folder; give one that holds {CONFIG} and {WEIGHTS[0]}, CONFIG=FILE.safetensors, "
        "or CONFIG/TAG as in ViT-B-32-quickgelu/openai"
    )


def _folder(folder: Path, network: str) -> Located:
    cure = "give a folder that open_clip's `local-dir:` can load"
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder / CONFIG} is missing: {cure}")
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise FileNotFoundError(f"{folder / WEIGHTS[0]} is missing: {cure}; random weights would score nothing")
    config = read_json(folder / CONFIG)
    return f"local-dir:{folder}", None, network, _doubts(config.get("model_cfg", config), str(folder))


def _file(config: str, rest: str) -> Located:
    name, _, prefix = rest.partition("#")
    path = Path(name)
    settings = _settings(config)
    if not path.is_file():
        raise FileNotFoundError(f"CLIP weights {path} do not exist: give CONFIG=FILE.safetensors")
    if path.suffix != ".safetensors":
        _check_pickle(path, prefix)
    return config, str(path), f"{config}, {path.name}", _doubts(settings, str(path))


def _check_pickle(path: Path, prefix: str) -> None:
    if not re.fullmatch("[0-9a-f]{8,64}", prefix):
        raise ValueError(
            f"{path}: a pickled file can hold more than weights; convert it to safetensors, or state the SHA-256 that "
            f"it was published with: CONFIG={path.name}#0123abcd"
        )
    digest = sha256_file(path)
    if not digest.startswith(prefix):
        raise ValueError(f"{path}: its SHA-256 is {digest[:16]}…, not {prefix}: another file, or a damaged one")


def _tag(config: str, tag: str) -> Located:
    import open_clip

    settings = _settings(config)
    row = open_clip.get_pretrained_cfg(config, tag)
    if not row:
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(config))
        raise ValueError(f"open_clip knows no weights {tag!r} of {config}; known: {tags}")
    repository = str(row.get("hf_hub", "")).rpartition("/")[0]
    if not repository:
        raise ValueError(f"{config}/{tag} is published as a pickle only: download it and give CONFIG=FILE.pt#SHA256")
    _download(repository, WEIGHTS[:1])  # open_clip then finds this file and takes no other
    doubts = _gelu_doubt(settings, bool(row.get("quick_gelu")), f"{config}/{tag}")
    return config, tag, f"{config}/{tag}", doubts


def _download(repository: str, weights: Sequence[str] = WEIGHTS) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, allow_patterns=["*.json", "*.txt", *weights]))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"CLIP model {repository} is neither in the hub's cache nor to be had: go online, or download "
            f"{CONFIG} and {WEIGHTS[0]} elsewhere and give their folder ({type(error).__name__})"
        ) from None
    if not any((folder / name).is_file() for name in weights):
        raise FileNotFoundError(f"{repository} holds no {WEIGHTS[0]}: give a model that is stored as safetensors")
    return folder


def _settings(config: str) -> dict[str, Any]:
    import open_clip

    settings = open_clip.get_model_config(config)
    if settings is None:
        raise ValueError(f"open_clip knows no configuration {config!r}; known are those of open_clip.list_models()")
    return settings


def _doubts(settings: dict[str, Any], location: str) -> tuple[str, ...]:
    """Return doubts about the activation of weights, which only the name of its origin tells."""
    trained = any(origin in location.lower() for origin in QUICK_GELU_ORIGINS)
    return _gelu_doubt(settings, True, location) if trained else ()


def _gelu_doubt(settings: dict[str, Any], trained: bool, name: str) -> tuple[str, ...]:
    uses = bool(settings.get("quick_gelu"))
    if uses == trained:
        return ()
    cure = "take the -quickgelu configuration" if trained else "take the configuration without -quickgelu"
    with_or_without = "with" if trained else "without"
    return (f"{name} was trained {with_or_without} QuickGELU and is computed otherwise, which moves scores: {cure}",)


# Parts of the names of files and folders whose weights need QuickGELU.
QUICK_GELU_ORIGINS = ("openai", "metaclip", "dfn")
