"""Programs that read what is exported, and what of a layer's format they lose: docs/exchange.md is written of it."""

from dataclasses import dataclass

from fluxq.quantize.exchange import compressed_tensors
from fluxq.quantize.exchange.gguf import TYPES
from fluxq.quantize.exchange.rows import Row


@dataclass(frozen=True)
class Reader:
    """A program that reads a dialect.

    command: that gets the checkpoint tiny-nvfp4, or one named there, into it. package, version: on PyPI, that tests run
    it with; "" for a program that was not run: what is written for it follows its specification. formats: those that
    tests read with it. proof: what these tests hold against ours, or how far tests without it go. commit: of a program
    that is not on PyPI, of which tests run a checkout that they are given. interpreter: the environment variable
    that names the Python of a program whose packages are not ours.
    """

    program: str
    dialect: str
    command: str
    package: str = ""
    version: str = ""
    formats: tuple[str, ...] = ()
    proof: str = ""
    commit: str = ""
    interpreter: str = ""


READERS = (
    Reader(
        "diffusers",
        "bfl",
        "fluxq export tiny-nvfp4 --format bfl",
        "diffusers",
        "0.42.1",
        ("fp8r", "nvfp4"),
        "whole models: all weights are ours bit for bit, the output is that of a bf16 model of them; no fluxq in "
        "the process",
    ),
    Reader(
        "SGLang-Diffusion",
        "modelopt",
        "fluxq export tiny-nvfp4 --format modelopt && sglang generate --model-path ./tiny-nvfp4-modelopt --prompt TEXT",
        "sglang",
        "0.5.23",
        ("NVFP4",),
        "its reader of configurations and parameters of its layers: those in 16 bit are ours, all tensors fit, and so "
        "is the policy of 16-bit activations; its fp8 has one scale for each weight, and x",
        interpreter="FLUXQ_SGLANG_PYTHON",
    ),
    Reader(
        "vLLM-Omni",
        "modelopt",
        "fluxq export tiny-nvfp4 --format modelopt && vllm serve ./tiny-nvfp4-modelopt --omni",
        "vllm-omni",
        "0.30.0",
        ("NVFP4", "FP8_PER_CHANNEL_PER_TOKEN"),
        "its loader on FLUX.1, Qwen-Image and Z-Image of few blocks: all tensors find their parameters, all "
        "weights are ours bit for bit",
        interpreter="FLUXQ_VLLM_OMNI_PYTHON",
    ),
    Reader(
        "ModelOpt",
        "modelopt",
        "",
        "nvidia-modelopt",
        "0.47.0",
        ("NVFP4",),
        "the producer: its own tensor class decodes ours bit for bit, its conversion of configurations gives ours",
    ),
    Reader(
        "ComfyUI",
        "comfy",
        "fluxq export tiny-nvfp4 --format comfy -o ComfyUI/models/diffusion_models/tiny-nvfp4.safetensors",
        "ComfyUI",
        "0.33.0",
        ("float8_e4m3fn", "nvfp4", "mxfp8", "int8_tensorwise"),
        "its loader, on FLUX.1, FLUX.2, SD3.5 and Wan of few blocks: no name is missing or left over, all weights "
        "are ours bit for bit, the output is that of a plain model of them",
        "783545f6",
    ),
    Reader(
        "comfy-kitchen",
        "comfy",
        "",
        "comfy-kitchen",
        "0.2.40",
        (
            *("float8_e4m3fn", "nvfp4", "mxfp8", "int8_tensorwise", "awq_w4a16"),
            *("svdquant_w4a4", "convrot_w4a4", "asym_w4a8_int8"),
        ),
        "ComfyUI's decoder: layers, and those of a whole file, are ours bit for bit; of svdquant_w4a4 within 2^-22, "
        "and 2^-8 where x is smoothed",
    ),
    Reader(
        "SGLang-Diffusion",
        "comfy",
        "fluxq export tiny-nvfp4 --format comfy --side-layers 16bit && "
        "sglang generate --model-path MODEL --transformer-weights-path tiny-nvfp4-comfy.safetensors --prompt TEXT",
        "sglang",
        "0.5.23",
        ("nvfp4", "mxfp8", "int8_tensorwise"),
        "its reader of markers: format of every layer, of which a file may have one; NVFP4 comes out in rows with the "
        "codes we have",
        interpreter="FLUXQ_SGLANG_PYTHON",
    ),
    Reader(
        "SGLang-Diffusion",
        "fp8_blocks",
        "fluxq export OUT --format fp8_blocks && sglang generate --model-path ./OUT-fp8_blocks --prompt TEXT",
        "sglang",
        "0.5.23",
        ("fp8",),
        "its reader of configurations and parameters of its layers: those in 16 bit are ours, all tensors fit",
        interpreter="FLUXQ_SGLANG_PYTHON",
    ),
    Reader(
        "vLLM",
        "compressed_tensors",
        "fluxq export OUT --format compressed-tensors && vllm serve ./OUT-compressed-tensors",
        proof="a text encoder that was quantized, with its tokenizer",
    ),
    Reader(
        "transformers",
        "compressed_tensors",
        "fluxq export OUT --format compressed-tensors",
        "compressed-tensors",
        "0.20.0",
        tuple(dict.fromkeys(row.name for row in compressed_tensors.ROWS)),
        "layers within 2^-22, or bf16 where it decodes to that; a whole T5 encoder in fp8, but none in 4 bits",
    ),
    Reader(
        "diffusers",
        "torchao",
        "fluxq export tiny-nvfp4 --format torchao",
        "torchao",
        "0.18.0",
        ("Float8Tensor", "Int8Tensor", "MXTensor", "NVFP4Tensor"),
        "whole models: all weights are ours bit for bit",
    ),
    Reader(
        "diffusers",
        "nunchaku_lite",
        "fluxq export tiny-nvfp4 --format nunchaku_lite",
        proof="names, shapes and dtypes pass the loader's own strict check; its kernels want a GPU and a download",
    ),
    Reader(
        "nunchaku",
        "nunchaku",
        "fluxq export tiny-int4-svd --format nunchaku",
        "nunchaku",
        "1.3.0dev",
        ("svdq_w4a4 int4", "svdq_w4a4 nvfp4", "awq_w4a16"),
        "FLUX.1 only; its loader in Python checks all names and shapes and holds what is in the file; its kernels "
        "want a GPU",
        "92e46957",
    ),
)
KEPT = {  # (dialect, format) -> what an import keeps, where that is not its codes
    ("comfy", "convrot_w4a4"): "codes, in int8 where bf16 does not hold the scales",
    ("comfy", "asym_w4a8_int8"): "the int8 codes that its reader multiplies",
}
WIDENED = {  # dialect -> formats whose codes no format of ours holds, so that they are read as 16 bit
    "bnb": ("nf4", "fp4"),
    "gguf": tuple(name for name in TYPES if name not in ("F32", "F16", "BF16")),
}
_ROUNDS = {  # a dialect's format, with these activations -> native tensors that it holds in fewer bits
    ("svdq_w4a4 int4", "int4"): {"pre_quant_scale"},
    ("svdquant_w4a4", "int4"): {"pre_quant_scale"},
    ("svdq_w4a4 nvfp4", "nvfp4"): {"pre_quant_scale", "weight_scale_2", "input_scale"},
    ("nvfp4-pack-quantized", "nvfp4"): {"weight_scale_2", "input_scale"},
    ("nvfp4-pack-quantized", None): {"weight_scale_2"},
}


def rounds(row: Row) -> set[str]:
    """Native tensors that a format of a dialect holds in fewer bits."""
    return _ROUNDS.get((row.name, row.activations), set())
