"""The nodes for ComfyUI: without it by doubles of what they ask of it, and in it, headless on a CPU.

    FLUXQ_COMFYUI=/path/to/ComfyUI FLUXQ_COMFYUI_PYTHON=/its/venv/bin/python pytest tests/integrations/test_comfyui.py

The interpreter needs fluxq and what ComfyUI asks for. The workflow is the one in docs, with text encoders and VAE taken
out: conditioning is drawn, and what the nodes give goes into a file.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny_configs import TINY_CONFIGS
from torch import nn

from fluxq.integrations.comfyui import NODE_CLASS_MAPPINGS, compare, load
from fluxq.integrations.comfyui.__main__ import SHIM, install, main
from fluxq.kernels.linear import QuantLinear, branch_shapes
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.transforms import rotate
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.computing import QuantizationConfig
from fluxq.recipes.formats import Scheme
from fluxq.recipes.keymaps import original_names
from tests.exchange.test_comfyui import LIKE_PUBLISHED, inputs_of

CHECKOUT = os.environ.get("FLUXQ_COMFYUI", "")
PYTHON = os.environ.get("FLUXQ_COMFYUI_PYTHON", sys.executable)
given = pytest.mark.skipif(not CHECKOUT, reason="FLUXQ_COMFYUI names no checkout of ComfyUI")
ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "docs/comfyui-compare.json"
ROTATED, CENTRED = "nvfp4-nvfp4-d2-h64-r4", "int4-16bit-center-smooth-r4"

# argv: checkout, folder of models, the workflow's changes, arguments of the model, file for what the nodes gave.
RUN = """
import asyncio, json, sys
checkout, models, prompt, arguments, out, node = sys.argv[1:]
sys.path.insert(0, checkout)
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import torch
import comfy.model_detection
import execution, folder_paths, nodes
from comfyui_version import __version__
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
detect = comfy.model_detection.detect_unet_config
def detected(*args, **kwargs):  # a FLUX.1 of this width has 24 heads for ComfyUI before 0.33
    config = detect(*args, **kwargs)
    return config if config is None else {**config, "num_heads": config["hidden_size"] // 128}
comfy.model_detection.detect_unet_config = detected
folder_paths.folder_names_and_paths["diffusion_models"] = ([models], {".safetensors"})
class Drawn:
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "draw", "test"
    @classmethod
    def INPUT_TYPES(cls): return {"required": {}}
    def draw(self):
        given = load_file(arguments)
        return ([[given["context"], {"pooled_output": given["y"]}]],)
class Keep:
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "keep", "test", True
    @classmethod
    def INPUT_TYPES(cls):
        kinds = {"a": "MODEL", "b": "MODEL", "latent_a": "LATENT", "latent_b": "LATENT", "map": "IMAGE",
                 "dB": "FLOAT", "text": "STRING"}
        return {"required": {name: (kind, {"forceInput": True}) for name, kind in kinds.items()}}
    def keep(self, a, b, latent_a, latent_b, map, dB, text):
        tensors = {"latent_a": latent_a["samples"], "latent_b": latent_b["samples"], "map": map}
        with torch.no_grad():
            for name, patcher in (("a", a), ("b", b)):
                given, net = load_file(arguments), patcher.model.diffusion_model
                dtype = patcher.model.manual_cast_dtype or patcher.model.get_dtype()
                given = {key: value if key in ("t", "guidance") else value.to(dtype) for key, value in given.items()}
                tensors[name] = net(given.pop("x"), given.pop("t"), **given).float()
        save_file({name: value.contiguous() for name, value in tensors.items()}, out)
        layers = [m for m in b.model.diffusion_model.modules() if type(m).__name__ == "QuantLinear"]
        sizes = [patcher.model_size() for patcher in (a, b)]
        try:
            b.clone().add_patches({}, 1.0)
            lora = ""
        except ValueError as error:
            lora = str(error)
        told.update(dB=dB, text=text, layers=len(layers), sizes=sizes, lora=lora, dtype=str(dtype))
        return ()
async def load_all():
    for name in ("nodes_flux", "nodes_sd3", "nodes_preview_any"):
        assert await nodes.load_custom_node(f"{checkout}/comfy_extras/{name}.py", module_parent="comfy_extras")
    assert await nodes.load_custom_node(node)
    nodes.NODE_CLASS_MAPPINGS |= {"Drawn": Drawn, "Keep": Keep}
    return await execution.validate_prompt("1", json.loads(prompt), None)
told = {"version": __version__}
valid, error, outputs, errors = asyncio.run(load_all())
assert valid, (error, errors)
server = type("Server", (), {"client_id": None, "last_node_id": None, "send_sync": lambda *args: None})()
executor = execution.PromptExecutor(server, cache_args={"lru": 0, "ram": 0, "ram_inactive": 0})
executor.execute(json.loads(prompt), "1", {}, outputs)
assert executor.success, executor.status_messages
print(json.dumps(told))
"""


# argv: checkout, JSON of [folder of a checkpoint, inputs, file for the output].
LOAD = """
import json, sys
checkout, jobs = sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, checkout)
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import torch
from fluxq.integrations.comfyui import load
from pathlib import Path
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
torch.set_grad_enabled(False)
kept = []  # one that is collected at the end of the process complains
for folder, inputs, out in jobs:
    kept.append(load.load_model(Path(folder)))
    given = load_file(inputs)
    y = kept[-1].model.diffusion_model(given.pop("x"), given.pop("t"), **given)
    save_file({"y": y.contiguous(), "layers": torch.tensor(len(load.quant_layers(kept[-1].model)))}, out)
"""


def layer_of(linear: Any, text: str) -> QuantLinear:
    """A layer near a Linear under a scheme, with small random transforms and branch."""
    scheme, (n, k) = Scheme.parse(text), linear.weight.shape
    weight, g = linear.weight.data.float(), torch.Generator().manual_seed(n + k)
    tensors = {name: 0.02 * torch.randn(*shape, generator=g) for name, shape in branch_shapes(scheme, n, k).items()}
    if scheme.smooth:
        tensors["pre_quant_scale"] = torch.exp2(torch.randint(-1, 2, (k,), generator=g))
        weight = weight / tensors["pre_quant_scale"]
    if scheme.deflate:
        tensors["deflate_basis"] = torch.linalg.qr(torch.randn(k, scheme.deflate, generator=g))[0].T
        tensors["deflate_out"] = weight @ tensors["deflate_basis"].T
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    quantized = QuantizedTensor.quantize(rotate(weight, scheme.hadamard), scheme.weights)
    return QuantLinear.from_tensors({**quantized.tensors(), **tensors, "bias": linear.bias.data}, (n, k), scheme)


def flux(folder: Path) -> tuple[Any, Any]:
    """Write a random FLUX.1 of few blocks in 16 bit, as ComfyUI has it, and in codes; return both."""
    config = {**TINY_CONFIGS["flux"], "in_channels": 64, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
    torch.manual_seed(0)
    model: Any = diffusers.FluxTransformer2DModel.from_config({**config, "guidance_embeds": True}).to(torch.bfloat16)
    state = model.state_dict()
    renamed = {}
    for original, parts, order in original_names("flux", state.keys()):
        rows = torch.cat([state[part] for part in parts])
        renamed[original] = torch.cat(rows.chunk(2)[::-1]) if order == "halves swapped" else rows
    folder.mkdir(parents=True)
    save_file(renamed, folder / "flux1-dev.safetensors")
    plain = diffusers.FluxTransformer2DModel.from_config(model.config).to(torch.bfloat16)
    plain.load_state_dict(state)
    for name, module in [*model.named_modules()]:
        # One of the joined q, k, v, MLP of a single block stays in 16 bit, and so do the ends.
        if isinstance(module, nn.Linear) and "blocks." in name and not name.endswith("proj_mlp"):
            model.set_submodule(name, layer_of(module, CENTRED if ".ff" in name else ROTATED))
        if name == "norm_out.linear":
            model.set_submodule(name, layer_of(module, "int8-16bit"))
    write(model, folder / "FLUX.1-dev-nvfp4-max")
    return plain, model


def write(model: Any, folder: Path) -> None:
    """Write a checkpoint of a model with quantized layers, as a pipeline's folder with nothing else."""
    (folder / "transformer").mkdir(parents=True)
    save_file(model.state_dict(), folder / "transformer/diffusion_pytorch_model.safetensors", {"format": "pt"})
    layers = ((name, m.stored_scheme) for name, m in model.named_modules() if isinstance(m, QuantLinear))
    says = QuantizationConfig.of(layers, "16bit", None, {}).to_dict()
    said = {**json.loads(model.to_json_string()), "quantization_config": says}
    (folder / "transformer/config.json").write_text(json.dumps(said))
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", type(model).__name__]}
    (folder / "model_index.json").write_text(json.dumps(index))


def arguments() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    shapes = {"x": (1, 16, 8, 6), "context": (1, 5, 64), "y": (1, 64)}
    drawn = {name: torch.randn(*shape, generator=g).bfloat16() for name, shape in shapes.items()}
    return {**drawn, "t": torch.tensor([0.5]), "guidance": torch.tensor([3.5])}


def by_diffusers(model: Any, dtype: torch.dtype) -> torch.Tensor:
    """The output as ComfyUI has it, (1, 16, 8, 6)."""
    given = {name: value if name in ("t", "guidance") else value.to(dtype) for name, value in arguments().items()}
    ids = torch.zeros(4, 3, 3)
    ids[..., 1] += torch.arange(4).unsqueeze(1)
    ids[..., 2] += torch.arange(3)
    x = given["x"].reshape(1, 16, 4, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 12, 64)
    with torch.no_grad():
        y = model(
            hidden_states=x,
            timestep=given["t"],
            encoder_hidden_states=given["context"],
            guidance=given["guidance"],
            pooled_projections=given["y"],
            img_ids=ids.reshape(-1, 3),
            txt_ids=torch.zeros(5, 3),
            return_dict=False,
        )[0]
    return y.float().reshape(1, 4, 3, 16, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(1, 16, 8, 6)


def workflow() -> dict:
    """The documented one, small, with drawn conditioning and without a VAE."""
    prompt = json.loads(WORKFLOW.read_text())
    for number in ("3", "8", "10", "11", "12", "13", "14"):
        del prompt[number]
    del prompt["9"]["inputs"]["vae"]
    prompt["4"] = {"class_type": "Drawn", "inputs": {}}
    prompt["7"]["inputs"] |= {"width": 64, "height": 48}
    prompt["9"]["inputs"]["steps"] = 2
    links = {"a": ["1", 0], "b": ["2", 0], "latent_a": ["9", 0], "latent_b": ["9", 1], "map": ["9", 2]}
    prompt["20"] = {"class_type": "Keep", "inputs": {**links, "dB": ["9", 3], "text": ["9", 4]}}
    return prompt


def doubles(monkeypatch, models: Path) -> list[dict]:
    """Put modules in place that the nodes import of ComfyUI; return what its sampler was called with."""
    calls: list[dict] = []

    def sample(model, latent, **settings):
        calls.append(settings)
        return ({"samples": torch.ones_like(latent["samples"]) * (1 - model.error)},)

    sampler = SimpleNamespace(SAMPLERS=["euler"], SCHEDULERS=["simple"])
    held = {
        "folder_paths": {"get_folder_paths": lambda kind: [str(models)]},
        "nodes": {"common_ksampler": sample},
        "comfy": {},
        "comfy.samplers": {"KSampler": sampler},
    }
    for name, members in held.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["comfy"].samplers = sys.modules["comfy.samplers"]  # pyright: ignore[reportAttributeAccessIssue]
    return calls


def test_two_nodes_say_what_comfyui_asks_of_them(tmp_path, monkeypatch) -> None:
    doubles(monkeypatch, tmp_path)
    assert [*NODE_CLASS_MAPPINGS] == ["FluxqLoad", "FluxqCompare"]
    used = {node["class_type"]: node["inputs"] for node in json.loads(WORKFLOW.read_text()).values()}
    for name, node in NODE_CLASS_MAPPINGS.items():
        asked = node.INPUT_TYPES()
        assert used[name].keys() <= {*asked["required"], *asked.get("optional", {})}
        assert used[name].keys() >= asked["required"].keys()
        assert callable(getattr(node, node.FUNCTION)) and all(kind.isupper() for kind in node.RETURN_TYPES)
    assert len(NODE_CLASS_MAPPINGS["FluxqCompare"].RETURN_NAMES) == len(
        NODE_CLASS_MAPPINGS["FluxqCompare"].RETURN_TYPES
    )


def test_install_writes_what_imports_the_nodes(tmp_path, monkeypatch) -> None:
    for folder, said in ((tmp_path, r"no folder of ComfyUI: it has no nodes\.py"), (Path("x" * 300), "cannot be writ")):
        with pytest.raises(ValueError, match=said):
            install(folder)
    (tmp_path / "custom_nodes").mkdir()
    (tmp_path / "nodes.py").touch()
    held: dict = {}
    exec(install(tmp_path).read_text(), held)
    assert held["NODE_CLASS_MAPPINGS"] is NODE_CLASS_MAPPINGS
    assert install(tmp_path).read_text() == SHIM  # its own is replaced
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CliRunner().invoke(main, ["--install=~"]).exit_code == 0


def linked(path: Path, to: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(to)


@pytest.mark.parametrize(
    ("in_the_way", "said"),
    [
        (lambda node: node.write_text("mine"), "fluxq is no folder; move it away"),
        (lambda node: linked(node, node.parent / "other"), "fluxq is a link, and what it leads to is not replaced"),
        (lambda node: linked(node, node.parent / "nowhere"), "fluxq is a link"),
        (lambda node: linked(node / "__init__.py", node.parent / "other/__init__.py"), "__init__.py is a link"),
        (lambda node: (node / "__init__.py").mkdir(parents=True), "__init__.py: no regular file"),
        (lambda node: shutil.copytree(node.parent / "other", node), "was not written by fluxq, and is not replaced"),
    ],
)
def test_install_replaces_nothing_but_its_own(in_the_way, said, tmp_path) -> None:
    other = tmp_path / "custom_nodes/other/__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    (tmp_path / "nodes.py").touch()
    in_the_way(tmp_path / "custom_nodes/fluxq")
    done = CliRunner().invoke(main, ["--install", str(tmp_path)])
    assert done.exit_code == 2 and said in done.output.replace("\n", " "), done.output
    left = [path.read_text() for path in tmp_path.rglob("*") if path.is_file() and path.name != "nodes.py"]
    assert set(left) == {"mine"}


def test_checkpoints_are_found_in_folders_of_models(tmp_path, monkeypatch) -> None:
    doubles(monkeypatch, tmp_path)
    ours, other = '{"quantization_config": {"quant_method": "fluxq"}}', '{"quantization_config": null}'
    for path, text in (
        ("a/transformer", ours),
        ("b", ours),
        ("c/d/unet", ours),
        ("e", other),
        ("f", "[]"),
        ("g", "[" * 100_000),
    ):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "config.json").write_text(text)
    assert sorted(load.checkpoints()) == ["a", "b", "c/d"]
    with pytest.raises(ValueError, match=r"no checkpoint 'gone' in .* copy the folder"):
        load.FluxqLoad().load("gone")


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("FluxTransformer2DModel", "{}", "nothing in .* is quantized by fluxq; load a 16-bit model with"),
        ("T5EncoderModel", None, "names of T5EncoderModel are not known .* in diffusers"),
    ],
)
def test_what_comfyui_has_no_names_for_is_refused(kind, text, said, tmp_path) -> None:
    (tmp_path / "transformer").mkdir()
    ours = '{"quantization_config": {"quant_method": "fluxq"}}'
    (tmp_path / "transformer/config.json").write_text(text or ours)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "X", "transformer": ["diffusers", kind]}))
    with pytest.raises(ValueError, match=said):
        load.denoiser_of(load.ModelFolder("x", tmp_path))


@pytest.mark.parametrize("order", ["as they are", "halves swapped"])
def test_joined_layers_are_the_layers_one_after_the_other(order) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    parts: list[Any] = [layer_of(linear.bfloat16(), ROTATED), nn.Linear(64, 96)]
    x = torch.randn(3, 64)
    expected = torch.cat([parts[0](x.bfloat16()).float(), parts[1](x)], -1)
    if order == "halves swapped":
        expected = torch.cat([expected[:, 64:], expected[:, :64]], -1)
    joined = load.JoinedLinear(parts, order)
    assert torch.equal(joined(x), expected) and joined.weight is None


def test_a_part_on_another_device_is_copied_for_the_call() -> None:
    part = layer_of(nn.Linear(64, 32).bfloat16(), CENTRED)
    moved = load._on(part, torch.device("meta"))
    assert all(tensor.is_meta for tensor in moved.parameters()) and not any(t.is_meta for t in part.parameters())
    assert load._on(part, torch.device("cpu")) is part


def test_tensors_of_quantized_layers_are_shapes_and_the_rest_is_as_it_was() -> None:
    torch.manual_seed(0)
    model: Any = diffusers.FluxTransformer2DModel.from_config(TINY_CONFIGS["flux"]).to(torch.bfloat16)
    block = model.transformer_blocks[0]
    whole = block.attn.to_k.weight
    block.attn.to_q = layer_of(block.attn.to_q, ROTATED)
    swapped = model.norm_out.linear.weight
    state, modules = load.translated("flux", model)
    assert [*modules] == ["double_blocks.0.img_attn.qkv"]
    (joined,) = modules.values()
    assert [type(part) for part in joined.parts] == [QuantLinear, nn.Linear, nn.Linear]
    quantized = state["double_blocks.0.img_attn.qkv.weight"]
    assert quantized.is_meta and quantized.shape == (3 * whole.shape[0], whole.shape[1])
    final = state["final_layer.adaLN_modulation.1.weight"]
    assert torch.equal(final, torch.cat(swapped.chunk(2)[::-1]))
    assert {name for name, tensor in state.items() if tensor.is_meta} == {
        f"double_blocks.0.img_attn.qkv.{part}" for part in ("weight", "bias")
    }


@pytest.mark.parametrize("name", ["add_patches", "add_hook_patches", "get_key_patches"])
def test_a_model_takes_no_lora_and_goes_into_no_merge(name, tmp_path, monkeypatch) -> None:
    doubles(monkeypatch, tmp_path)
    module: Any = ModuleType("comfy.model_patcher")
    module.ModelPatcher = type("ModelPatcher", (), {"get_key_patches": lambda self, prefix: {}})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules["comfy"], "model_patcher", module, raising=False)
    with pytest.raises(ValueError, match="no LoRA or merge goes into quantized layers here"):
        getattr(load._patcher_class()(), name)("diffusion_model.")


def test_compare_gives_both_models_one_noise_and_tells_the_error(tmp_path, monkeypatch) -> None:
    calls = doubles(monkeypatch, tmp_path)
    a, b = (SimpleNamespace(model=nn.Linear(1, 1), error=error) for error in (0.0, 0.1))
    settings = json.loads(WORKFLOW.read_text())["9"]["inputs"]
    settings = {
        name: value for name, value in settings.items() if name not in ("model_16bit", "model_quantized", "vae")
    }
    settings["latent_image"] = {"samples": torch.zeros(2, 4, 3, 5)}
    node: Any = compare.FluxqCompare()
    *_, error, ratio, text = node.compare(a, b, **settings)
    assert calls[0] == calls[1] == {name: value for name, value in settings.items() if name != "latent_image"}
    assert ratio == pytest.approx(20.0, abs=1e-4) and text.startswith("SQNR of latents 20.0, 20.0 dB")
    assert error.shape == (2, 3, 5, 3) and error.min() == pytest.approx(1, abs=1e-5) and error.max() == 1
    vae = SimpleNamespace(decode=lambda latents: 5 * latents.movedim(1, -1)[..., :3] - 4)
    *_, text = node.compare(a, b, vae=vae, **settings)
    assert "PSNR of images 6.1, 6.1 dB" in text  # 255 beside 128
    a.error = 0.1
    assert node.compare(a, b, **settings)[3] == float("inf")


def test_compare_refuses_what_cannot_be_compared(tmp_path, monkeypatch) -> None:
    doubles(monkeypatch, tmp_path)
    a, b = SimpleNamespace(model=nn.Linear(1, 1)), SimpleNamespace(model=nn.ReLU())
    with pytest.raises(ValueError, match="model_16bit is a Linear, model_quantized a ReLU"):
        compare.FluxqCompare().compare(a, b, {})
    with pytest.raises(ValueError, match="both inputs are the same model"):
        compare.FluxqCompare().compare(a, a, {})


@given
def test_a_workflow_runs_headless_and_computes_what_diffusers_does(tmp_path) -> None:
    plain, model = flux(tmp_path / "models")
    save_file(arguments(), tmp_path / "arguments.safetensors")
    (tmp_path / "comfyui/custom_nodes").mkdir(parents=True)
    (tmp_path / "comfyui/nodes.py").touch()
    node = install(tmp_path / "comfyui").parent
    out = tmp_path / "out.safetensors"
    files = [tmp_path / "models", json.dumps(workflow()), tmp_path / "arguments.safetensors", out, node]
    command = [PYTHON, "-c", RUN, CHECKOUT, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    told, held = json.loads(done.stdout.splitlines()[-1]), load_file(out)
    dtype = getattr(torch, told["dtype"].removeprefix("torch."))
    assert "unet missing" not in done.stderr and "unet unexpected" not in done.stderr
    assert told["layers"] == len([m for m in model.modules() if isinstance(m, QuantLinear)])
    assert told["sizes"][1] < 0.7 * told["sizes"][0]
    assert "fluxq quantize MODEL --lora" in told["lora"]
    loaded = type(plain).from_pretrained(tmp_path / "models/FLUX.1-dev-nvfp4-max/transformer", dtype=dtype)
    ours = {"a": by_diffusers(plain.to(dtype), dtype), "b": by_diffusers(loaded, dtype)}
    apart = {name: ((held[name] - y).norm() / y.norm()).item() for name, y in ours.items()}
    lost = ((ours["a"] - ours["b"]).norm() / ours["a"].norm()).item()
    assert apart["a"] < 1e-5 and apart["b"] < 1e-3 < lost / 10, (apart, lost)
    assert told["dB"] == pytest.approx(compare.sqnr(list(held["latent_a"]), list(held["latent_b"])).mean().item())
    assert f"{told['dB']:.1f} dB" in told["text"]
    assert held["map"].shape == (1, 6, 8, 3) and held["map"].max() == 1


@given
def test_models_of_other_families_compute_what_diffusers_does(tmp_path) -> None:
    jobs, models = [], []
    for family in ("sd3", "wan"):
        row, config = FAMILIES[family], {**TINY_CONFIGS[family], **LIKE_PUBLISHED[family][0]}
        torch.manual_seed(0)
        model: Any = getattr(diffusers, row.model).from_config(config).to(torch.bfloat16)
        for name, module in [*model.named_modules()]:
            if isinstance(module, nn.Linear) and "blocks." in name and module.in_features % 64 == 0:
                model.set_submodule(name, layer_of(module, ROTATED))
        write(model, tmp_path / family)
        ours, theirs = inputs_of(family)
        save_file(ours, tmp_path / f"{family}-inputs.safetensors")
        jobs.append([str(tmp_path / each) for each in (family, f"{family}-inputs.safetensors", f"{family}-out")])
        models.append((type(model), theirs))
    done = subprocess.run(
        [PYTHON, "-c", LOAD, CHECKOUT, json.dumps(jobs)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "unet missing" not in done.stderr and "unet unexpected" not in done.stderr
    for (kind, given), (folder, _, out) in zip(models, jobs, strict=True):
        model = kind.from_pretrained(f"{folder}/transformer", dtype=torch.float32)
        with torch.no_grad():
            y = model(**given, return_dict=False)[0]
        held = load_file(out)
        assert held["layers"] == len(load.quant_layers(model))
        assert ((held["y"] - y).norm() / y.norm()).item() < 1e-3, folder
