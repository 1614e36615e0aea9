"""Load models of few blocks into vLLM-Omni's own classes on a CPU, beside diffusers' of the same folder.

Run by an interpreter that has vLLM-Omni: test_plug_ins.py says with what. argv: a file of JSON, {path: folders that
hold fluxq and its metadata, meet: a file, rank, ranks, runs: [{folder, plain, dtype}]}. The first run of a plain model
and dtype is that of the plain one. With several ranks each runs this; outputs are whole on each.

The last line that it prints is JSON, for each run {config, methods, difference, alike}: the class of the configuration,
how many Linears have a method, the distance of both outputs by the norm of diffusers', and that which a difference of
the plain models' size makes in diffusers' alone.
"""

import importlib
import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

GIVEN = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
sys.path[:0] = GIVEN["path"]

import diffusers  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
declared = torch.library.Library("_C", "FRAGMENT")
declared.define("silu_and_mul(Tensor! out, Tensor input) -> ()")
import vllm.platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

vllm.platforms._current_platform = CpuPlatform()
import vllm_omni.platforms  # noqa: E402
from vllm_omni import plugins  # noqa: E402

for plug_in in plugins.load_omni_plugins_by_group(plugins.OMNI_DEFAULT_PLUGINS_GROUP).values():
    plug_in()
from safetensors import safe_open  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import get_pp_group, init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.layers.linear import LinearBase  # noqa: E402
from vllm_omni.diffusion.attention.backends import abstract  # noqa: E402
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum  # noqa: E402
from vllm_omni.diffusion.data import TransformerConfig  # noqa: E402
from vllm_omni.diffusion.distributed import parallel_state  # noqa: E402
from vllm_omni.diffusion.forward_context import set_forward_context  # noqa: E402
from vllm_omni.diffusion.model_loader import diffusers_loader  # noqa: E402
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs  # noqa: E402

# It knows no platform of a CPU: attention is torch's SDPA.
sdpa = DiffusionAttentionBackendEnum.TORCH_SDPA.get_path()
type(vllm_omni.platforms.current_omni_platform).get_diffusion_attn_backend_cls = classmethod(lambda *a, **k: sdpa)
abstract.AttentionImpl.forward = lambda self, *a: self.forward_cuda(*a)

PARALLEL = SimpleNamespace(
    sequence_parallel_size=1, mask_sp_padding=False, tensor_parallel_size=GIVEN["ranks"], ring_degree=1,
    ulysses_degree=1, use_hsdp=False, allgather_degree=1, cfg_parallel_size=1,
)  # fmt: skip
ENGINE = SimpleNamespace(parallel_config=PARALLEL, dtype=torch.bfloat16)
DRAWS = 4
OWN = {}  # (folder of a plain model, dtype) -> how far the engine is from diffusers there
FILES = {
    "FluxTransformer2DModel": "flux.flux_transformer",
    "QwenImageTransformer2DModel": "qwen_image.qwen_image_transformer",
    "ZImageTransformer2DModel": "z_image.z_image_transformer",
    "WanTransformer3DModel": "wan2_2.wan2_2_transformer",
}


def native(folder, dtype):
    """Return (model, its configuration) of a transformer's folder, built and loaded as vLLM-Omni does."""
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    transformer = TransformerConfig.from_dict(described)
    name = described["_class_name"]
    kind = getattr(importlib.import_module("vllm_omni.diffusion.models." + FILES[name]), name)
    given = get_transformer_config_kwargs(transformer, kind)
    if name.startswith("Qwen"):
        given["od_config"] = ENGINE
    torch.set_default_dtype(dtype)
    model = kind(quant_config=transformer.quant_config, **given)
    torch.set_default_dtype(torch.float32)
    source = SimpleNamespace(subfolder="transformer", prefix="")
    adapter = diffusers_loader.get_checkpoint_adapter(
        model=model, source=source, quant_config=transformer.quant_config, use_safetensors=True
    )
    model.load_weights(adapter.adapt(weights(folder)) if adapter else weights(folder))
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.quant_method.process_weights_after_loading(module)
    return model, transformer.quant_config


def weights(folder):
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as handle:
            for name in handle.keys():
                yield name, handle.get_tensor(name)


def inputs(config, dtype):
    """Return arguments that both models take."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    kind = config["_class_name"]
    half = torch.tensor([0.5]).to(dtype)
    if kind.startswith("Wan"):
        given = {"hidden_states": random(1, config["in_channels"], 3, 8, 8), "timestep": torch.tensor([500])}
        given["encoder_hidden_states"] = random(1, 8, config["text_dim"])
        if config.get("image_dim"):
            given["encoder_hidden_states_image"] = random(1, 4, config["image_dim"])
        return {**given, "return_dict": False}
    if kind.startswith("ZImage"):
        caption = random(32, config["cap_feat_dim"])
        return {"x": [random(config["in_channels"], 1, 16, 8)], "t": half, "cap_feats": [caption]}
    given = {"hidden_states": random(1, 16, config["in_channels"]), "timestep": half, "return_dict": False}
    given["encoder_hidden_states"] = random(1, 8, config["joint_attention_dim"])
    if kind.startswith("Qwen"):
        mask = torch.ones(1, 8, dtype=torch.bool)
        return {**given, "img_shapes": [[(1, 4, 4)]], "encoder_hidden_states_mask": mask}
    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    pooled = random(1, config["pooled_projection_dim"])
    return {**given, "pooled_projections": pooled, "img_ids": ids, "txt_ids": torch.zeros(8, 3)}


def output(model, given):
    """Return what a model computes, in fp32."""
    if type(model).__name__.startswith("Qwen") and "vllm_omni" in type(model).__module__:
        given = {**given, "txt_seq_lens": [8]}
    with torch.no_grad():
        said = model(**given)
    said = said.sample if hasattr(said, "sample") else said[0]
    return (said[0] if isinstance(said, list) else said).float()


def distance(a, b):
    return ((a - b).norm() / a.norm()).item()


def alike(plain, folder, given, own):
    """Return how far diffusers' model of a folder is from itself with noise that moves the plain model by `own`.

    The noise is on the inputs of every Linear, in fp32, and the mean is over a few draws. It is what rounding of inputs
    makes of a difference of that size, whoever computes: an input that moves may get another code.
    """

    def moved(model, size, seed):
        generator = torch.Generator().manual_seed(seed)

        def noisy(_, arguments):
            x, *rest = arguments
            return (x * (1 + size * torch.randn(x.shape, generator=generator)), *rest)

        hooks = [m.register_forward_pre_hook(noisy) for m in model.modules() if isinstance(m, torch.nn.Linear)]
        said = output(model, given)
        for hook in hooks:
            hook.remove()
        return distance(output(model, given), said)

    model = loaded(plain, torch.float32)
    size = own / statistics.fmean(moved(model, 1e-3, seed) / 1e-3 for seed in range(DRAWS))
    model = loaded(folder, torch.float32)
    return statistics.fmean(moved(model, size, seed) for seed in range(DRAWS))


def loaded(folder, dtype):
    kind = getattr(diffusers, json.loads((folder / "config.json").read_text(encoding="utf-8"))["_class_name"])
    return kind.from_pretrained(folder, torch_dtype=dtype).eval()


def run(folder, plain, dtype):
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    given = inputs(described, dtype)
    model, config = native(folder, dtype)
    difference = distance(output(loaded(folder, dtype), given), output(model, given))
    methods = [type(module.quant_method).__name__ for module in model.modules() if isinstance(module, LinearBase)]
    own = OWN.setdefault((plain, dtype), difference)
    return {
        "config": type(config).__name__,
        "methods": {name: methods.count(name) for name in sorted(set(methods))},
        "difference": difference,
        "alike": own if folder == plain else alike(plain, folder, inputs(described, torch.float32), own),
    }


def main():
    rank, ranks = GIVEN["rank"], GIVEN["ranks"]
    vllm_config = VllmConfig()
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(ranks, rank, "file://" + GIVEN["meet"], rank, "gloo")
        initialize_model_parallel(ranks)
        parallel_state._PP = parallel_state._SP = get_pp_group()
        with set_forward_context(vllm_config, ENGINE):
            done = [
                run(Path(each["folder"]), Path(each["plain"]), getattr(torch, each["dtype"])) for each in GIVEN["runs"]
            ]
    print(json.dumps(done))


main()
