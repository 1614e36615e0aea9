"""Several components under one recipe: what is written for each, and which names select them."""

import json
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_configs import TINY_CONFIGS
from torch import nn

from fluxq import tiny
from fluxq.base import console
from fluxq.base.model import ModelFolder, load_pipeline
from fluxq.calibrate.capture import Sampling, capture_statistics
from fluxq.calibrate.statistics import Statistics
from fluxq.cli import cli
from fluxq.jobs import making
from fluxq.kernels.linear import QuantLinear
from fluxq.quantize.checkpoint import SourceWeights, library_of, write_component
from fluxq.quantize.nearest import quantize_weight
from fluxq.quantize.run import quantize_component
from fluxq.quantize.structure import list_linears
from fluxq.quantize.verify import verify
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.plan import Plan, component_recipe, make_plan
from fluxq.recipes.recipe import load_recipe, shipped_recipes

ENCODERS = ("text_encoder", "text_encoder_2")
TINY = ModelFolder("tiny", Path(tiny.path()))


def quantized(recipe, output, components, model="tiny") -> Path:
    """A checkpoint folder, made without the closing check."""
    asked = making.JobOptions(
        model=str(model), recipe=str(recipe), output=str(output), components=components, check=False
    )
    making.quantize(making.job_of(asked))
    return Path(output)


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Path:
    """The embedded pipeline with its transformer and both text encoders in fp8."""
    return quantized("fp8", tmp_path_factory.mktemp("three") / "out", ("transformer", "text_encoder_2", "text_encoder"))


@pytest.fixture
def fluxq(tmp_path, monkeypatch):
    """Run the command line in an empty folder; returns click's result."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli, [str(argument) for argument in arguments])


def planned(folder: ModelFolder, component: str, recipe="fp8") -> Plan:
    family = FAMILIES[{"T5EncoderModel": "t5", "CLIPTextModel": "clip"}[folder.components[component]]]
    entry = component_recipe(load_recipe(recipe)[1], component, family)
    return make_plan(family, component, entry, list_linears(folder, component), static_inputs=False)


# What is written


@pytest.mark.often(2)
@pytest.mark.parametrize("recipe", shipped_recipes())
@pytest.mark.parametrize("component", ENCODERS)
def test_a_text_encoder_is_written_as_its_own_library_reads_it(recipe, component, tmp_path):
    plan, source = planned(TINY, component, recipe), SourceWeights(TINY, component)
    files = quantize_component(plan, source, None, torch.bfloat16, tmp_path / "work")
    write_component(tmp_path / "out", TINY, plan, files, max_shard_bytes=10**9)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    said = config.pop("quantization_config")
    assert config == TINY.config(component)
    (scheme,) = said["layers"]
    assert scheme.endswith("-16bit") and said["quant_method"] == "fluxq" and said["required_features"] == []
    held = load_file(tmp_path / "out" / "model.safetensors")
    for layer in plan.quantized:
        q = quantize_weight(source[f"{layer.name}.weight"], layer)
        if not layer.scheme.weights.has_tensor_scale:  # which joined layers share
            assert torch.equal(held[f"{layer.name}.weight"].squeeze(-1).view(torch.uint8), q.codes.view(torch.uint8))
        assert held.pop(f"{layer.name}.weight").shape == (*q.codes.shape, 1)
        assert held.pop(f"{layer.name}.weight_scale").shape == q.scale.shape
        held.pop(f"{layer.name}.weight_scale_2", None)
    quantized_weights = {f"{layer.name}.weight" for layer in plan.quantized}
    assert held.keys() == {*source.names} - quantized_weights
    assert all(torch.equal(tensor, source[name]) for name, tensor in held.items())


def test_a_transformer_s_codes_have_no_axis_of_one(three):
    held = load_file(three / "transformer" / "diffusion_pytorch_model.safetensors")
    assert held["transformer_blocks.0.attn.to_q.weight"].shape == (128, 128)


def test_shards_of_a_text_encoder_are_named_as_transformers_names_them(tmp_path):
    plan, source = planned(TINY, "text_encoder_2"), SourceWeights(TINY, "text_encoder_2")
    blocks = quantize_component(plan, source, None, torch.bfloat16, tmp_path / "work")
    write_component(tmp_path / "out", TINY, plan, blocks, max_shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    model = transformers.T5EncoderModel.from_pretrained(tmp_path / "out")
    assert isinstance(model.encoder.block[0].layer[1].DenseReluDense.wo, QuantLinear)


@pytest.mark.parametrize("component", ENCODERS)
def test_transformers_without_fluxq_fails_instead_of_computing_with_codes(three, component, tmp_path, monkeypatch):
    """The axis of one is what makes it fail: without it codes load as if they were weights."""
    monkeypatch.delitem(transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING, "fluxq")
    monkeypatch.delitem(transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "fluxq")
    model = getattr(transformers, TINY.components[component])
    with pytest.raises(RuntimeError, match="mismatch"):
        model.from_pretrained(three / component)
    (tmp_path / "config.json").write_text((three / component / "config.json").read_text())
    held = load_file(three / component / "model.safetensors")
    held = {key: tensor.squeeze(-1).contiguous() for key, tensor in held.items()}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.from_pretrained(tmp_path)


def test_the_record_the_card_and_the_rest_of_the_folder(three):
    record = json.loads((three / "fluxq_plan.json").read_text())
    parts = {part["component"]: part for part in record["components"]}
    assert list(parts) == ["transformer", "text_encoder_2", "text_encoder"]
    assert {name: part["family"] for name, part in parts.items()} == {
        "transformer": "flux",
        "text_encoder_2": "t5",
        "text_encoder": "clip",
    }
    for name, part in parts.items():
        (file,) = (three / name).glob("*.safetensors")
        with safe_open(file, framework="pt") as stream:
            held = [stream.get_tensor(key) for key in stream.keys()]
        assert part["bytes_after"] == sum(t.numel() * t.element_size() for t in held) < part["bytes_before"]
        assert part["bytes_before"] == SourceWeights(TINY, name).nbytes
        assert record["model"]["digests"][name] == TINY.digest(name)
    assert record["identity"]["components"] == ["text_encoder", "text_encoder_2", "transformer"]
    card = (three / "README.md").read_text()
    assert "6 of 6 Linears of the text_encoder_2 are quantized" in card
    assert "| text_encoder | qkv | fp8-16bit | 3 |" in card and "| transformer | qkv | fp8-fp8 | 3 |" in card
    for path in Path(tiny.path()).rglob("*"):
        copied = three / path.relative_to(tiny.path())
        if path.is_file() and path.parent.name not in parts and path.name != "README.md":
            assert copied.read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_a_pipeline_with_quantized_text_encoders_stays_close(three):
    prompts, noise = list(tiny.PROMPTS[:2]), [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    call = {**tiny.CALL_KWARGS, "num_inference_steps": 2, "output_type": "latent"}
    latents = []
    for folder in (TINY, ModelFolder("three", three)):
        pipe = load_pipeline(folder)
        latents.append(pipe(prompts, generator=[g.manual_seed(7) for g in noise], **call).images.float())
    error = (latents[1] - latents[0]).square().sum() / latents[0].square().sum()
    assert 0 < error < 0.01


def test_what_the_commands_print_counts_all_components(fluxq, three):
    names = "transformer,text_encoder_2,text_encoder"
    done = fluxq("quantize", "tiny", "--recipe", "fp8", "--no-check", "-o", three, "--components", names)
    assert done.exit_code == 0, done.stderr
    lines = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert lines["fp8"].split() == ["fp8", "transformer", "text_encoder_2", "text_encoder", "total"]
    counts = [count for count in lines["layers quantized"].split("  ") if count.strip()][1:]
    assert [count.split()[0] for count in counts] == ["38", "6", "6", "50"]
    assert "already done" in done.stdout
    other = fluxq("quantize", "tiny", "--recipe", "fp8", "--no-check", "-o", three)
    assert other.exit_code == 2 and "differs in components" in other.stderr


@pytest.mark.slow
def test_eval_says_which_components_it_counts(fluxq, three, tmp_path):
    folder = shutil.copytree(three, tmp_path / "out")
    done = fluxq("eval", folder, "--count", "2", "--num-inference-steps", "1", "--metrics", "psnr")
    assert done.exit_code == 0, done.stderr
    names = "transformer, text_encoder_2, text_encoder"
    parts = json.loads((three / "fluxq_plan.json").read_text())["components"]
    after = sum(part["bytes_after"] for part in parts)
    assert f"{names}: {console.size(after)} on disk instead of 3.57 MB" in done.stdout
    assert names in (folder / "eval" / "report.html").read_text()


# Which components


def test_plan_takes_the_components_asked_for(fluxq):
    done = fluxq("plan", "tiny", "--recipe", "nvfp4", "--components", "text_encoder_2, text_encoder", "--json")
    assert done.exit_code == 0, done.stderr
    plans = json.loads(done.stdout)
    assert list(plans) == ["text_encoder_2", "text_encoder"]
    schemes = {layer["scheme"] for layers in plans.values() for layer in layers}
    assert schemes == {"nvfp4-16bit"}  # weight-only: nothing to calibrate


@pytest.mark.parametrize(
    ("components", "words"),
    [
        ("unet", ["tiny has no component 'unet'; it has", "text_encoder_2", "transformer, vae"]),
        ("tokenizer", ["CLIPTokenizer is no model class of this transformers", "without weights"]),
        ("transformer,", ["--components", "one comma between"]),
        ("vae", ["vae: the recipe or the kl row leaves every Linear in 16 bit"]),  # the embedded one has no attention
    ],
)
def test_components_that_cannot_be_quantized_are_named(fluxq, components, words):
    refused = fluxq("plan", "tiny", "--recipe", "fp8", "--components", components)
    assert refused.exit_code == 2 and all(word in refused.stderr for word in words), refused.stderr


def test_calibrate_says_where_there_is_nothing_to_calibrate(fluxq, statistics_file):
    refused = fluxq("calibrate", "tiny", "--recipe", "nvfp4", "--components", "text_encoder", "-o", "s.safetensors")
    assert refused.exit_code == 2 and "text_encoder: quantized weight-only, which needs no statistics" in refused.stderr
    refused = fluxq("plan", "tiny", "--components", "text_encoder", "--statistics", statistics_file)
    assert refused.exit_code == 2 and "leave out --statistics" in refused.stderr


def test_a_recipe_may_name_several_components(fluxq):
    Path("both.yaml").write_text(
        "extends: nvfp4\ncomponents:\n  text_encoder:\n    weights: {format: int8}\n    activations: null\n"
    )
    plans = json.loads(fluxq("plan", "tiny", "--recipe", "both.yaml", "--json").stdout)
    assert {layer["scheme"] for layer in plans["text_encoder"]} == {"int8-16bit"}
    assert "nvfp4-nvfp4-static" in {layer["scheme"] for layer in plans["transformer"]}
    Path("bad.yaml").write_text(
        "extends: fp8\ncomponents:\n  text_encoder:\n    weights: {format: fp8}\n    activations: {format: fp8}\n"
    )
    refused = fluxq("plan", "tiny", "--recipe", "bad.yaml")
    assert refused.exit_code == 2
    assert "text_encoder: it runs once per image" in refused.stderr and "activations: null" in refused.stderr


def test_patterns_concern_the_components_that_they_match(fluxq):
    both = ("--recipe", "fp8", "--components", "transformer,text_encoder")

    def schemes(*arguments) -> dict[str, int]:
        done = fluxq("plan", "tiny", *both, *arguments, "--json")
        assert done.exit_code == 0, done.stderr
        return {name: sum(la["scheme"] != "16bit" for la in part) for name, part in json.loads(done.stdout).items()}

    assert schemes("--exclude", "encoder.layers.*.mlp.*") == {"transformer": 38, "text_encoder": 4}
    assert schemes("--include", "**.to_q", "--include", "**.q_proj") == {"transformer": 5, "text_encoder": 1}
    refused = fluxq("plan", "tiny", *both, "--include", "**.to_q")
    assert "text_encoder: no --include pattern matches a Linear of it" in refused.stderr
    refused = fluxq("plan", "tiny", *both, "--exclude", "**.nothing")
    assert "pattern '**.nothing' matches no Linear" in refused.stderr


@pytest.mark.slow
def test_a_vae_is_quantized_with_a_warning_that_says_what_it_saves(tiny_folder, tmp_path, caplog):
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL.from_config({**TINY_CONFIGS["kl"], "latent_channels": 4})
    vae.to(torch.bfloat16).save_pretrained(tiny_folder / "vae")
    out = quantized("fp8", tmp_path / "out", ("vae",), tiny_folder)
    (part,) = json.loads((out / "fluxq_plan.json").read_text())["components"]
    saved = 1 - part["bytes_after"] / part["bytes_before"]
    assert f"vae: quantizing it saves {100 * saved:.1f}% of its size" in caplog.text and 0.001 < saved < 0.1
    kept = {layer["name"] for layer in part["layers"] if layer["scheme"] != "fp8-16bit"}
    assert len(part["layers"]) == 10 and kept == {"quant_conv", "post_quant_conv"}
    loaded = diffusers.AutoencoderKL.from_pretrained(out / "vae", dtype=torch.bfloat16)
    assert isinstance(loaded.decoder.mid_block.attentions[0].to_q, QuantLinear)


# Tensors of other names


def encoder_folder(tmp_path, family, rename=lambda name: name, extra=None) -> tuple[ModelFolder, nn.Module]:
    """A pipeline folder whose one component is a random model of the row, its tensors under other names."""
    model_class = getattr(transformers, family.model)
    torch.manual_seed(0)
    model = model_class(model_class.config_class.from_dict(TINY_CONFIGS[family.name]))
    (tmp_path / "te").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"te": ["transformers", family.model]}))
    model.config.save_pretrained(tmp_path / "te")
    tensors = {rename(name): tensor.detach().clone() for name, tensor in model.state_dict().items()}
    save_file({**tensors, **(extra or {})}, tmp_path / "te" / "model.safetensors", metadata={"format": "pt"})
    return ModelFolder("m", tmp_path), model


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("clip", lambda name: f"text_model.{name}"),
        ("qwen3", lambda name: f"model.{name}"),
        ("gemma3", lambda name: name.replace("model.language_model.", "language_model.model.", 1)),
        ("qwen2_5_vl", lambda name: name.replace("model.language_model.", "model.", 1)),
        ("t5", lambda name: name),
    ],
)
def test_old_names_are_read_as_transformers_reads_them(tmp_path, name, rename):
    family = FAMILIES[name]
    stranger = {"unknown.weight": torch.ones(2)}
    folder, model = encoder_folder(tmp_path, family, rename, stranger)
    assert library_of(folder, "te") == "transformers"
    source, held = SourceWeights(folder, "te"), model.state_dict()
    assert set(source.names) == {*held, *stranger}
    assert all(torch.equal(source[name], tensor) for name, tensor in held.items())
    entry = component_recipe(load_recipe("fp8")[1], "te", family)
    plan = make_plan(family, "te", entry, list_linears(folder, "te"), static_inputs=False)
    files = quantize_component(plan, source, None, torch.bfloat16, tmp_path / "work")
    written = {name for file in files for name in load_file(file)}
    assert {f"{layer.name}.weight_scale" for layer in plan.quantized} <= written


def test_tied_tensors_are_kept_as_the_file_has_them(tmp_path):
    folder, model = encoder_folder(tmp_path, FAMILIES["t5"])
    assert model.shared.weight is model.encoder.embed_tokens.weight
    entry = component_recipe(load_recipe("int4")[1], "te", FAMILIES["t5"])
    plan = make_plan(FAMILIES["t5"], "te", entry, list_linears(folder, "te"), static_inputs=False)
    files = quantize_component(plan, SourceWeights(folder, "te"), None, torch.bfloat16, tmp_path / "work")
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert torch.equal(written["shared.weight"], written["encoder.embed_tokens.weight"])


# Two transformers


@pytest.fixture(scope="module")
def wan(tmp_path_factory) -> Path:
    """A random text-to-video pipeline with one transformer for the noisy steps and one for the others, fp32."""
    folder = tmp_path_factory.mktemp("wan") / "model"
    config = {**TINY_CONFIGS["wan"], "image_dim": None, "added_kv_proj_dim": None, "text_dim": 128}
    torch.manual_seed(0)
    umt5 = transformers.UMT5EncoderModel(transformers.UMT5Config(**TINY_CONFIGS["umt5"]))
    diffusers.WanPipeline(
        tokenizer=transformers.AutoTokenizer.from_pretrained(Path(tiny.path()) / "tokenizer_2"),
        text_encoder=umt5,
        transformer=diffusers.WanTransformer3DModel(**config),
        transformer_2=diffusers.WanTransformer3DModel(**config),
        vae=diffusers.AutoencoderKLWan(base_dim=3, z_dim=4, num_res_blocks=1),
        scheduler=diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        boundary_ratio=0.5,
    ).save_pretrained(folder)
    call = {"num_inference_steps": 4, "height": 16, "width": 16, "num_frames": 1, "guidance_scale": 1.0}
    (folder / "fluxq_generation.json").write_text(json.dumps(call))
    return folder


@pytest.mark.slow
def test_two_transformers_are_fitted_each_to_its_own_calls(fluxq, wan, tmp_path):
    recipe = tmp_path / "quick.yaml"
    recipe.write_text("extends: nvfp4\ncompat: full\ncalibration: {count: 2, steps: 4}\n")
    done = fluxq("quantize", wan, "--recipe", recipe, "-o", "out", "--no-check")  # both, unless one is named
    assert done.exit_code == 0, done.stderr
    record = json.loads(Path("out", "fluxq_plan.json").read_text())
    first, second = (part["groups"] for part in record["components"])
    assert [group["group"] for group in first] == [group["group"] for group in second]
    assert all(group["sqnr_db"] for group in [*first, *second])
    assert [group["sqnr_before_db"] for group in first] != [group["sqnr_before_db"] for group in second]
    pipe = diffusers.WanPipeline.from_pretrained("out", dtype=torch.bfloat16)
    for model in (pipe.transformer, pipe.transformer_2):
        assert {name for m in model.modules() if isinstance(m, QuantLinear) for name in m.scheme.features}


@pytest.mark.slow
def test_two_transformers_are_calibrated_in_one_run(fluxq, wan, quick_recipe):
    recipe = quick_recipe("nvfp4", fitted=False)
    recipe.write_text(recipe.read_text().replace("{count: 8, steps: 2}", "{count: 2, steps: 4}"))
    both = ("--recipe", recipe, "--components", "transformer,transformer_2,text_encoder")
    done = fluxq("calibrate", wan, *both, "-o", "s.safetensors")
    assert done.exit_code == 0, done.stderr
    statistics = Statistics.load(Path("s.safetensors"))
    folder = ModelFolder("wan", wan)
    assert statistics.trajectory["model"] == {n: folder.digest(n) for n in ("transformer", "transformer_2")}
    first, second = (statistics.of_component(name) for name in ("transformer", "transformer_2"))
    assert first.groups.keys() == second.groups.keys() and len(statistics.groups) == 2 * len(first.groups)
    assert first.amax("blocks.0.attn1.to_q") != second.amax("blocks.0.attn1.to_q")
    seen = [part.groups["blocks.0.attn1.to_q"].count for part in (first, second)]
    assert bool(((seen[0] > 0) != (seen[1] > 0)).all())  # each looks at its own noise levels

    done = fluxq("quantize", wan, *both, "-o", "out", "--no-check", "--statistics", "s.safetensors")
    assert done.exit_code == 0, done.stderr
    for name, part in (("transformer", first), ("transformer_2", second)):
        held = load_file(Path("out") / name / "diffusion_pytorch_model.safetensors")
        expected = part.amax("blocks.0.attn1.to_q") / (6 * 448)
        assert torch.equal(held["blocks.0.attn1.to_q.input_scale"], expected)
        # The model computes with these in fp32, whatever dtype it is loaded in.
        assert (
            held["blocks.0.scale_shift_table"].dtype == torch.float32
            and held["proj_out.weight"].dtype == torch.bfloat16
        )
    pipe = diffusers.WanPipeline.from_pretrained("out", dtype=torch.bfloat16)
    assert all(isinstance(model.blocks[0].attn1.to_q, QuantLinear) for model in (pipe.transformer, pipe.transformer_2))
    just = ("--recipe", recipe, "--components", "transformer")
    alone = fluxq("quantize", wan, *just, "-o", "one", "--no-check", "--statistics", "s.safetensors")
    assert alone.exit_code == 0, alone.stderr  # of the statistics it takes its own part
    one, two = (load_file(Path(out, "transformer", "diffusion_pytorch_model.safetensors")) for out in ("one", "out"))
    assert all(torch.equal(one[name], two[name]) for name in two if name.endswith("scale"))


@pytest.mark.slow
def test_sound_is_not_compared_and_that_is_said_before_any_work(fluxq, wan, tmp_path):
    model = shutil.copytree(wan, tmp_path / "sound")
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "_class_name": "StableAudio3Pipeline"}))
    (model / "fluxq_generation.json").unlink()
    refused = fluxq("quantize", model, "--recipe", "fp8", "-o", "out")
    said = "sound: a StableAudio3Pipeline makes audios, and only images and video can be compared; "
    assert refused.exit_code == 2 and said + "pass --no-check" in refused.stderr and not Path("out").exists()
    done = fluxq("quantize", model, "--recipe", "fp8", "-o", "out", "--no-check")
    assert done.exit_code == 0 and "next: fluxq verify out" in done.stdout
    for command in ("eval", "bench", "debug"):
        refused = fluxq(command, "out")
        assert refused.exit_code == 2 and said + "`fluxq verify`" in refused.stderr, refused.output


def test_groups_of_one_component_keep_their_names(pipe, tmp_path):
    path = "transformer_blocks.0.attn.to_q"
    items, call = [(tiny.PROMPTS[0], 0)], {**tiny.CALL_KWARGS, "num_inference_steps": 1}
    sampling = Sampling(call, 1, {"transformer": "d"})
    one = capture_statistics(pipe, {"transformer": {"q": path}}, items, sampling, folder=tmp_path)
    assert list(one.groups) == ["q"] and one.trajectory["model"] == "d" and one.of_component("transformer") is one


# An adapter beside a text encoder, which transformers loads with it


@pytest.fixture
def adapted(tiny_folder) -> Path:
    """The pipeline with an adapter beside its second text encoder, as PEFT saves one."""
    folder = tiny_folder / "text_encoder_2"
    said = {"peft_type": "LORA", "r": 2, "target_modules": ["q"], "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    layer = "base_model.model.encoder.block.0.layer.0.SelfAttention.q"
    k = TINY.config("text_encoder_2")["d_model"]
    save_file({f"{layer}.lora_A.weight": torch.ones(2, k)}, folder / "adapter_model.safetensors")
    return tiny_folder


def test_an_adapter_that_quantized_weights_would_lack_is_refused(fluxq, adapted, tmp_path):
    for command in ("plan", "quantize"):
        done = fluxq(command, adapted, "--recipe", "fp8", "--components", "text_encoder_2,transformer")
        assert done.exit_code == 2, done.output
        said = f"{adapted / 'text_encoder_2' / 'adapter_config.json'}: an adapter, which transformers adds"
        assert said in done.output and "leave text_encoder_2 out" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
def test_an_adapter_that_is_copied_is_recorded_where_a_lost_plan_file_leaves_it(adapted, tmp_path):
    folder = quantized("fp8", tmp_path / "out", ("transformer",), adapted)
    assert {result.status for result in verify(folder)} == {"ok"}
    (folder / "fluxq_plan.json").unlink()
    assert [finding for result in verify(folder) for finding in result.findings] == []
    file = folder / "text_encoder_2" / "adapter_model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    (found,) = [finding for result in verify(folder) for finding in result.findings]
    assert found.where == "text_encoder_2" and found.what.startswith("other tensors than transformer/config.json")
    config = folder / "transformer" / "config.json"
    said = json.loads(config.read_text())
    said["quantization_config"].pop("digests")
    config.write_text(json.dumps(said))
    found = [finding for result in verify(folder) for finding in result.findings]
    assert [each.where for each in found] == [
        f"text_encoder_2/adapter_{name}" for name in ("config.json", file.name[8:])
    ]
    assert all("nothing records it" in each.what for each in found)
