"""Other packages on the same layers, for compare.py: each in a process of its own, where it may fail or crash.

What is run is one nn.Linear on the CPU, configured as the package's own presets have it. 8-bit layers compute in fp32,
so that only their rounding counts; 4-bit ones in bfloat16, which then is what most of them keep their scales in. Bits
are those of what a package stores for the weight; codes that it unpacks to whole bytes count as packed. What needs a
GPU says so in place of a number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from signal import Signals
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.base.console import first_line
from fluxq.base.tensors import TensorFile, save_weights

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class PeerLayer:
    """weight (N, K), tokens (M, K) to calibrate with and to judge by."""

    weight: Tensor
    fit: Tensor
    judge: Tensor


@dataclass(frozen=True)
class Values:
    """Of one layer: SQNR of its output, stored bits per weight, seconds that quantizing took."""

    db: float
    bits: float
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """A configuration on all layers of a file, or why there is none. layers: empty after an error."""

    configuration: str
    layers: tuple[Values, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Peer:
    """package: what pip installs. module: what is imported. configurations: name -> what quantizes a layer."""

    package: str
    module: str
    configurations: Mapping[str, Configuration]


Configuration = Callable[[PeerLayer], tuple[Callable[[Tensor], Tensor], float]]  # -> (x -> y, bits per weight)


def is_installed(peer: str) -> bool:
    """Tell whether its module can be found, without importing it."""
    package, _, _ = PEERS[peer].module.rpartition(".")
    if package and find_spec(package.partition(".")[0]) is None:
        return False
    try:
        return find_spec(PEERS[peer].module) is not None
    except ModuleNotFoundError:
        return False


def measured(peer: str, layers: Sequence[PeerLayer]) -> Iterator[Outcome]:
    """Every configuration of a peer, in a process that starts again behind a configuration that kills it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.safetensors"
        tensors = {
            f"{index}.{name}": tensor.float().cpu().contiguous()
            for index, layer in enumerate(layers)
            for name, tensor in vars(layer).items()
        }
        save_weights(tensors, path, {"layers": str(len(layers))})
        left = list(PEERS[peer].configurations)
        while left:
            outcomes, problem = _in_a_process(peer, path, left)
            if problem and len(outcomes) < len(left):
                outcomes.append(Outcome(left[len(outcomes)], error=problem))
            yield from outcomes
            left = left[len(outcomes) :]


def measured_here(peer: str, path: Path, configurations: Iterable[str]) -> Iterator[str]:
    """The same in this process: an Outcome as JSON for each configuration."""
    with TensorFile(path) as stream:
        held = {name: stream.get_tensor(name) for name in stream.keys()}
    count = len(held) // 3
    layers = [PeerLayer(*(held[f"{index}.{name}"] for name in ("weight", "fit", "judge"))) for index in range(count)]
    for name in configurations:
        quantize = PEERS[peer].configurations[name]
        with redirect_stdout(sys.stderr):  # packages print
            try:
                import_module(PEERS[peer].module)  # no layer is to be charged for it
                outcome = Outcome(name, tuple(_values(quantize, layer) for layer in layers))
            except Exception as error:  # whatever a package raises is the result
                outcome = Outcome(name, error=f"{type(error).__name__}: {first_line(error)[:120]}")
        yield json.dumps(asdict(outcome))


def output_db(y: Tensor, approximate: Tensor) -> float:
    """10 log10 Σ y² / Σ (y^ - y)²."""
    lost = (approximate.double() - y.double()).square().sum()
    return float(10 * torch.log10(y.double().square().sum() / lost))


def _in_a_process(peer: str, path: Path, configurations: Sequence[str]) -> tuple[list[Outcome], str]:
    """(outcomes so far, what ended the process early)."""
    wanted = [word for name in configurations for word in ("--configuration", name)]
    command = [sys.executable, "-m", "benchmarks.layers.compare", "--peer", peer, str(path), *wanted]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **threads}, cwd=ROOT)
    outcomes = []
    for line in done.stdout.splitlines():
        if line.startswith('{"configuration"'):
            value = json.loads(line)
            layers = tuple(Values(**layer) for layer in value["layers"])
            outcomes.append(Outcome(value["configuration"], layers, value["error"]))
    if done.returncode < 0:
        return outcomes, f"killed by {Signals(-done.returncode).name}"
    said = done.stderr.strip().splitlines()
    return outcomes, (said[-1][:160] if said else "ended early") if len(outcomes) < len(configurations) else ""


def _values(quantize: Configuration, layer: PeerLayer) -> Values:
    start = time.perf_counter()
    compute, bits = quantize(layer)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        return Values(output_db(layer.judge @ layer.weight.T, compute(layer.judge).float()), bits, seconds)


def _sequential(layer: PeerLayer, dtype: torch.dtype) -> nn.Sequential:
    """Packages replace children of a module: the Linear is one. Some change its weight in place: it has a copy."""
    linear = nn.Linear(layer.weight.shape[1], layer.weight.shape[0], bias=False, dtype=dtype)
    linear.weight.data = layer.weight.to(dtype, copy=True)
    return nn.Sequential(linear).eval()


def _in(dtype: torch.dtype, model: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x.to(dtype))


def _stored(tensors: Iterable[Tensor], layer: PeerLayer, codes: int = 0) -> float:
    """Bits per weight of all tensors, beside `codes` for each weight."""
    return codes + sum(8 * t.nbytes for t in tensors) / layer.weight.numel()


# --- torchao


def _torchao(bits: int, make: Callable[[], Any]) -> Configuration:
    def quantize(layer: PeerLayer) -> tuple[Callable[[Tensor], Tensor], float]:
        dtype = torch.float32 if bits == 8 else torch.bfloat16
        model = _sequential(layer, dtype)
        import_module("torchao.quantization").quantize_(model, make())
        weight: Any = model[0].weight
        rest = [getattr(weight, name) for name in weight.__tensor_flatten__()[0] if name != "qdata"]
        return _in(dtype, model), _stored([t for t in rest if t is not None and t.any()], layer, bits)  # no zero points

    return quantize


def _torchao_config(name: str, module: str = "torchao.quantization", **options: Any) -> Callable[[], Any]:
    return lambda: getattr(import_module(module), name)(**options)


def _torchao_int4(name: str, granularity: str) -> Callable[[], Any]:
    def make() -> Any:
        api: Any = import_module("torchao.quantization")
        return getattr(api, name)(**{"weight_dtype": getattr(torch, "int4"), granularity: api.PerGroup(64)})  # noqa: B009

    return make


def _torchao_mxfp4() -> Any:
    fp4 = torch.float4_e2m1fn_x2
    kernels: Any = import_module("torchao.quantization.quantize_.common").KernelPreference
    return import_module(_MX_FORMATS).MXDynamicActivationMXWeightConfig(
        activation_dtype=fp4, weight_dtype=fp4, kernel_preference=kernels.EMULATED
    )


# --- optimum-quanto


def _quanto(bits: int, weights: str, activations: str | None = None) -> Configuration:
    def quantize(layer: PeerLayer) -> tuple[Callable[[Tensor], Tensor], float]:
        quanto: Any = import_module("optimum.quanto")
        dtype = torch.float32 if bits == 8 else torch.bfloat16
        model = _sequential(layer, dtype)
        quanto.quantize(model, getattr(quanto, weights), activations and getattr(quanto, activations))
        if activations:
            with torch.no_grad(), quanto.Calibration():
                for chunk in layer.fit.split(1024):
                    model(chunk.to(dtype))
        quanto.freeze(model)
        stored = [tensor for name, tensor in model.state_dict().items() if name.startswith("0.weight")]
        return _in(dtype, lambda x: _plain(model(x))), _stored(stored, layer)

    return quantize


def _plain(y: Any) -> Tensor:
    return y.dequantize() if type(y) is not Tensor else y


# --- nvidia-modelopt


def _modelopt(bits: int, name: str) -> Configuration:
    """Its quantizers compute what a checkpoint would give but store nothing: bits follow from their settings.

    Scales count as 16 bits, those of NVFP4 and MXFP4 as the 8 that they have.
    """

    def quantize(layer: PeerLayer) -> tuple[Callable[[Tensor], Tensor], float]:
        mtq: Any = import_module("modelopt.torch.quantization")
        dtype = torch.float32 if bits == 8 else torch.bfloat16
        model = mtq.quantize(_sequential(layer, dtype), getattr(mtq, name), lambda m: m(layer.fit.to(dtype)))
        linear: Any = model[0]
        n, k = layer.weight.shape
        group = (linear.weight_quantizer.block_sizes or {}).get(-1, k)
        scale = 8 if (linear.weight_quantizer.block_sizes or {}).get("scale_bits") else 16
        smooth = getattr(linear.input_quantizer, "_pre_quant_scale", None)
        low_rank = sum(t.numel() for name, t in linear.named_parameters() if "lora" in name)
        stored = bits + scale / group + 16 * ((0 if smooth is None else k) + low_rank) / (n * k)
        return _in(dtype, model), stored

    return quantize


# --- auto-round


def _auto_round(scheme: str, bits: int, group: int, scale_bits: int) -> Configuration:
    """Its tuning of one block, through the door that it has for other programs; the block is one Linear here."""

    def quantize(layer: PeerLayer) -> tuple[Callable[[Tensor], Tensor], float]:
        auto_round: Any = import_module("auto_round")
        k = layer.weight.shape[1]
        block = _Block(_sequential(layer, torch.float32)[0])
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text("{}")  # it looks a model up by the name of its folder
            model = _Decoder(block, folder)
            for name, module in model.named_modules():
                module.global_name = name  # pyright: ignore[reportArgumentType]  as it names modules itself
            tokens = min(_SAMPLE_TOKENS, len(layer.fit))
            samples = layer.fit[: len(layer.fit) // tokens * tokens].split(tokens)
            tuning = auto_round.AutoRound(
                model,
                tokenizer="",
                scheme=scheme,
                nsamples=len(samples),
                seqlen=tokens,
                batch_size=min(8, len(samples)),
                device_map="cpu",
                enable_torch_compile=False,
                amp=False,
                to_quant_block_names="model.layers",
            )
            tuning.post_init()
            tuning.quantize_block(block, [(((sample[None],), {}),) for sample in samples], None, "cpu", False)
        return block, bits + scale_bits / (group or k)

    return quantize


class _Block(nn.Module):
    """Decoder layer for auto-round."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return self.linear(hidden_states)


class _Decoder(nn.Module):
    """Language model for auto-round: a list of layers, and a configuration that says nothing."""

    def __init__(self, block: nn.Module, folder: str) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([block])  # where it looks for them
        self.config = SimpleNamespace(model_type="none", architectures=["None"], to_dict=dict)
        self.name_or_path, self.dtype, self.device = folder, torch.float32, torch.device("cpu")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule("model.layers.0")(*args, **kwargs)


_SAMPLE_TOKENS = 256
_MX_FORMATS = "torchao.prototype.mx_formats"

PEERS = {
    "torchao": Peer(
        "torchao",
        "torchao",
        {
            "int8 W8A8": _torchao(8, _torchao_config("Int8DynamicActivationInt8WeightConfig")),
            "int4 g64 W4A16": _torchao(4, _torchao_int4("IntxWeightOnlyConfig", "granularity")),
            "int4 g64 W4A8": _torchao(4, _torchao_int4("Int8DynamicActivationIntxWeightConfig", "weight_granularity")),
            "nvfp4 W4A16": _torchao(4, _torchao_config("NVFP4WeightOnlyConfig", _MX_FORMATS)),
            "nvfp4 W4A4": _torchao(
                4, _torchao_config("NVFP4DynamicActivationNVFP4WeightConfig", _MX_FORMATS, use_triton_kernel=False)
            ),
            "mxfp4 W4A4": _torchao(4, _torchao_mxfp4),
        },
    ),
    "auto-round": Peer(
        "auto-round",
        "auto_round",
        {
            "int8 W8A8": _auto_round("INT8", 8, 0, 16),
            "int4 g128 W4A16": _auto_round("W4A16", 4, 128, 16),
            "nvfp4 W4A4": _auto_round("NVFP4", 4, 16, 8),
            "mxfp4 W4A4": _auto_round("MXFP4", 4, 32, 8),
        },
    ),
    "optimum-quanto": Peer(
        "optimum-quanto",
        "optimum.quanto",
        {
            "int8 W8A8": _quanto(8, "qint8", "qint8"),
            "int4 W4A16": _quanto(4, "qint4"),
            "int4 W4A8": _quanto(4, "qint4", "qint8"),
        },
    ),
    "nvidia-modelopt": Peer(
        "nvidia-modelopt",
        "modelopt.torch.quantization",
        {
            "int8 W8A8": _modelopt(8, "INT8_DEFAULT_CFG"),
            "int8 SmoothQuant W8A8": _modelopt(8, "INT8_SMOOTHQUANT_CFG"),
            "int4 g128 W4A16": _modelopt(4, "INT4_BLOCKWISE_WEIGHT_ONLY_CFG"),
            "int4 g128 AWQ W4A16": _modelopt(4, "INT4_AWQ_CFG"),
            "nvfp4 W4A4": _modelopt(4, "NVFP4_DEFAULT_CFG"),
            "nvfp4 SVDQuant W4A4": _modelopt(4, "NVFP4_SVDQUANT_DEFAULT_CFG"),
            "mxfp4 W4A4": _modelopt(4, "MXFP4_DEFAULT_CFG"),
        },
    ),
}
