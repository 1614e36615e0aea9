"""The family that is read from structure: held against the rows written by hand, and run on classes without a row."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from click.testing import CliRunner
from tiny_configs import TINY_CONFIGS
from torch import nn

import fluxq
from fluxq import QuantLinear, tiny
from fluxq.base.model import ModelFolder
from fluxq.calibrate.capture import watch_shared_inputs
from fluxq.cli import cli
from fluxq.jobs import making
from fluxq.quantize.checkpoint import build_on_meta
from fluxq.quantize.structure import component_family, denoisers_of, model_family, tree_of
from fluxq.recipes.all_families import FAMILIES, PUBLISHED, family_of
from fluxq.recipes.family import Family
from fluxq.recipes.generic import LEAST_CERTAINTY, ModuleTree, generic_family, read_structure
from fluxq.recipes.plan import LinearShape

ROWS = [row for row in FAMILIES.values() if row.kind == "transformer"]

# Against the row: what generic does not join, by the last names of its Linears, though they read the same values.
NOT_JOINED = {
    "flux": {("proj_mlp", "to_k", "to_q", "to_v")},  # of a single block: attention beside feed-forward
    "chroma": {("proj_mlp", "to_k", "to_q", "to_v")},
    "hunyuan_video": {("proj_mlp", "to_k", "to_q", "to_v")},
    "sd3": {("to_k", "to_q", "to_v")},  # attn2, which in most models reads the text
}


@cache
def tree(model_class: str, config: str) -> ModuleTree:
    return tree_of(build_on_meta("diffusers", model_class, json.loads(config)))


def parts(family: Family, found: ModuleTree) -> tuple[set[frozenset[str]], set[str], set[str]]:
    """(sets of Linears that share an input, those of modulation, those that stay in 16 bit)."""
    groups: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    modulation, kept = set(), set()
    for linear in found.linears:
        located = family.locate(linear.name)
        if located is None:
            kept.add(linear.name)
        elif located[0].role == "modulation":
            modulation.add(linear.name)
        else:
            groups.setdefault((located[1], located[0].members), set()).add(linear.name)
    return {frozenset(group) for group in groups.values()}, modulation, kept


@pytest.mark.often(8)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_it_finds_what_a_row_says(row):
    _, missed = compared_with_the_row(row, TINY_CONFIGS[row.name])
    assert missed == NOT_JOINED.get(row.name, set())


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [model for model in PUBLISHED if FAMILIES[model.family] in ROWS], ids=lambda m: m.name
)
def test_it_finds_what_a_row_says_of_published_models_and_is_sure(model):
    certainty, missed = compared_with_the_row(FAMILIES[model.family], model.config)
    assert missed <= NOT_JOINED.get(model.family, set())
    assert certainty > (0.75 if model.name == "Stable Diffusion 1.5" else 0.94)


def compared_with_the_row(row: Family, config: Mapping[str, object]) -> tuple[float, set[tuple[str, ...]]]:
    """(certainty, groups that are not joined as a whole); the rest is as in the row, or it fails."""
    found = tree(row.model, json.dumps(config))
    structure = read_structure(row.model, found)
    groups, modulation, kept = parts(row, found)
    own_groups, own_modulation, own_kept = parts(structure.family, found)
    assert own_modulation == modulation
    assert own_kept == kept and all(structure.family.kept(name) for name in kept)
    assert all(any(own <= group for group in groups) for own in own_groups)
    missed = {tuple(sorted(name.rpartition(".")[2] for name in group)) for group in groups - own_groups}
    return structure.certainty, missed


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_it_is_sure_enough_of_every_model_with_a_row_once_blocks_repeat(row):
    """In tiny configurations of two blocks each, where embedders weigh more than in any real one."""
    counts = {
        name: 2 for name, n in TINY_CONFIGS[row.name].items() if n == 1 and name.endswith(("layers", "per_block"))
    }
    found = tree(row.model, json.dumps({**TINY_CONFIGS[row.name], **counts}))
    structure = read_structure(row.model, found)
    assert structure.certainty >= LEAST_CERTAINTY
    assert generic_family(row.model, found) == structure.family


def test_certainty_is_the_share_of_weights_in_repeated_blocks_under_telling_names():
    linears = [("blocks.0.attn.qkv", 384, 128), ("blocks.0.attn.out", 128, 128), ("blocks.0.mystery", 128, 128)]
    linears += [(name.replace("0", "1", 1), n, k) for name, n, k in linears] + [("head", 128, 128)]
    found = toy(linears)
    structure = read_structure("Toy", found)
    assert structure.certainty == pytest.approx(2 * 4 / (2 * 5 + 1))
    assert "mystery" in structure.family.notes[0] and "73%" in structure.family.notes[0]
    alone = read_structure("Toy", toy(linears[:3]))
    assert alone.certainty == 0 and "only one Block" in "; ".join(alone.reasons)


def toy(linears: list[tuple[str, int, int]]) -> ModuleTree:
    """A tree of blocks of class Block in module lists."""
    modules = {"": "Toy"}
    for name, _, _ in linears:
        segments = name.split(".")
        for depth in range(1, len(segments) + 1):
            path, is_number = ".".join(segments[:depth]), depth < len(segments) and segments[depth].isdigit()
            kind = "Block" if segments[depth - 1].isdigit() else "Module"
            modules[path] = "Linear" if depth == len(segments) else "ModuleList" if is_number else kind
    return ModuleTree(modules, tuple(LinearShape(*linear) for linear in linears))


BLOCK = [("attn.to_q", 128, 128), ("attn.to_k", 128, 128), ("attn.to_v", 128, 128), ("attn.to_out.0", 128, 128)]


def blocks(members: list[tuple[str, int, int]], count: int = 2) -> list[tuple[str, int, int]]:
    return [(f"blocks.{i}.{name}", n, k) for i in range(count) for name, n, k in members]


@pytest.mark.parametrize(
    ("members", "groups"),
    [
        (BLOCK, {("attn.to_q", "attn.to_k", "attn.to_v")}),
        (
            [(name.replace("attn", "cross_attn"), n, k) for name, n, k in BLOCK],
            {("cross_attn.to_k", "cross_attn.to_v")},
        ),
        ([BLOCK[0], *((name, n, 256) for name, n, _ in BLOCK[1:3])], {("attn.to_k", "attn.to_v")}),  # other K: the text
        (
            [
                *BLOCK,
                *((name.replace("attn", "other_attention"), n, k) for name, n, k in BLOCK),
            ],  # which reads the text?
            {("attn.to_k", "attn.to_v"), ("other_attention.to_k", "other_attention.to_v")},
        ),
        (
            [*BLOCK, ("attn.add_q_proj", 128, 128), ("attn.add_k_proj", 128, 128), ("attn.add_v_proj", 128, 128)],
            {("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")},
        ),
        ([*BLOCK[3:], ("ff.w1", 512, 128), ("ff.w2", 128, 512), ("ff.w3", 512, 128)], {("ff.w1", "ff.w3")}),
        ([*BLOCK[3:], ("ff.w1", 512, 128), ("ff.w2", 512, 512), ("ff.w3", 128, 512)], set()),  # one after another
        ([*BLOCK[3:], ("ff.w1", 512, 128), ("ff.w2", 512, 128)], set()),  # of what?
        ([*BLOCK[3:], ("ff.a", 128, 128), ("ff.b", 128, 128), ("ff.c", 128, 128)], set()),  # shapes do not tell
    ],
)
def test_linears_share_an_input_only_where_names_and_shapes_say_so(members, groups):
    family = read_structure("Toy", toy(blocks(members))).family
    assert {group.members for group in family.groups if len(group.members) > 1} == groups
    assert all(group.joined == (len(group.members) > 1) for group in family.groups)
    assert {group.made_by for group in family.groups} == {"unknown"}


def test_a_group_is_split_where_one_block_tells_its_linears_apart():
    text = [(f"blocks.2.{name}", n, 256 if name[-1] in "kv" else k) for name, n, k in BLOCK]
    groups = {group.members for group in read_structure("Toy", toy([*blocks(BLOCK), *text])).family.groups}
    assert ("attn.to_q",) in groups and ("attn.to_k", "attn.to_v") in groups
    apart = [
        ("blocks.2.attn.to_k", 128, 128),
        ("blocks.2.attn.to_v", 128, 256),
    ]  # q could go with either, not with both
    groups = {group.members for group in read_structure("Toy", toy([*blocks(BLOCK), *apart])).family.groups}
    assert ("attn.to_q", "attn.to_k") in groups and ("attn.to_v",) in groups


def test_first_and_last_blocks_may_lack_some():
    short = [(f"blocks.2.{name}", n, k) for name, n, k in BLOCK[:2]]
    structure = read_structure("Toy", toy([*blocks([*BLOCK, ("mlp.up", 512, 128), ("mlp.down", 128, 512)]), *short]))
    assert structure.certainty == 1 and structure.family.locate("blocks.2.attn.to_k")
    assert [group.role for group in structure.family.groups] == ["qkv", "attn_out", "ff_up", "ff_down"]


@pytest.mark.parametrize(
    ("name", "n", "k", "reason"),
    [
        ("gates", 8, 128, "too small"),
        ("odd", 128, 1001, "K = 1001"),
        ("mlp.gate", 64, 512, "routes tokens"),
        ("mlp.router", 128, 512, "routes tokens"),
    ],
)
def test_what_does_not_fit_stays_in_16_bit_with_a_reason(name, n, k, reason):
    family = read_structure("Toy", toy(blocks([*BLOCK, (name, n, k)]))).family
    assert family.locate(f"blocks.1.{name}") is None and reason in family.kept(f"blocks.1.{name}")


def test_what_is_outside_of_blocks_and_stacks_of_embedders_stay_in_16_bit():
    refiner = [(f"context_embedder.blocks.{i}.{name}", n, k) for i in range(2) for name, n, k in BLOCK]
    stack = [(f"cond.layers.{i}.linear_1", 128, 128) for i in range(4)]  # repeated, but nothing attends
    family = read_structure(
        "Toy", toy([*refiner, *stack, ("x_embedder", 128, 64), *blocks(BLOCK), ("head", 64, 128)])
    ).family
    assert {family.locate(name) for name, _, _ in [*refiner, *stack, ("x_embedder", 0, 0), ("head", 0, 0)]} == {None}
    assert "embeds" in family.kept("context_embedder.blocks.0.attn.to_q") and "undamped" in family.kept("head")


def test_a_structure_that_says_little_is_refused_with_the_way_out():
    obscure = [(f"blocks.{i}.{name}", 128, 128) for i in range(8) for name in ("a", "b", "c", "d")]
    with pytest.raises(
        ValueError, match=r"Toy has no row .*certainty 0%, needed 50%.*no module list.*CONTRIBUTING\.md"
    ):
        family_of("Toy", toy(obscure))
    assert family_of("Toy", toy(blocks(BLOCK))).name == "generic"


def test_only_denoisers_go_without_a_row():
    with torch.device("meta"):
        vae = diffusers.AutoencoderTiny(
            encoder_block_out_channels=(16,),
            decoder_block_out_channels=(16,),
            num_encoder_blocks=(1,),
            num_decoder_blocks=(1,),
        )
    with pytest.raises(ValueError, match=r"AutoencoderTiny has no row in recipes/all_families\.py"):
        model_family(vae)


# Classes without a row

TEXT = {"encoder_hidden_states": torch.randn(1, 5, 128)}
CLASSES = {
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "attention_head_dim": 64,
            "num_attention_heads": 2,
            "joint_attention_dim": 128,
            "caption_projection_dim": 128,
            "pos_embed_max_size": 16,
        },
        {"hidden_states": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([0.5]), **TEXT},
    ),
    "CogVideoXTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 64,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 128,
            "text_embed_dim": 128,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 1,
            "max_text_seq_length": 5,
        },
        {"hidden_states": torch.randn(1, 1, 4, 8, 8), "timestep": torch.tensor([5]), **TEXT},
    ),
    "MochiTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 64,
            "num_layers": 3,
            "pooled_projection_dim": 128,
            "in_channels": 4,
            "text_embed_dim": 128,
            "time_embed_dim": 128,
            "max_sequence_length": 5,
        },
        {
            "hidden_states": torch.randn(1, 4, 1, 8, 8),
            "timestep": torch.tensor([5]),
            "encoder_attention_mask": torch.ones(1, 5, dtype=torch.bool),
            **TEXT,
        },
    ),
    "AllegroTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 96,
            "num_layers": 2,
            "cross_attention_dim": 192,
            "sample_height": 8,
            "sample_width": 8,
            "sample_frames": 2,
            "caption_channels": 128,
        },
        {
            "hidden_states": torch.randn(1, 4, 2, 8, 8),
            "timestep": torch.tensor([5]),
            "attention_mask": torch.ones(1, 2, 8, 8),
            "encoder_attention_mask": torch.ones(1, 1, 5),
            "encoder_hidden_states": torch.randn(1, 1, 5, 128),
        },
    ),
    "StableAudioDiTModel": (
        {
            "sample_size": 8,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 64,
            "num_attention_heads": 2,
            "num_key_value_attention_heads": 1,
            "out_channels": 4,
            "cross_attention_dim": 128,
            "time_proj_dim": 32,
            "global_states_input_dim": 128,
            "cross_attention_input_dim": 128,
        },
        {
            "hidden_states": torch.randn(1, 4, 8),
            "timestep": torch.tensor([5.0]),
            "global_hidden_states": torch.randn(1, 1, 128),
            **TEXT,
        },
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_groups_of_a_class_without_a_row_read_the_same_values(name):
    torch.manual_seed(0)
    config, inputs = CLASSES[name]
    model = getattr(diffusers, name).from_config(config)
    groups, modulation, _ = parts(model_family(model), tree_of(model))
    seen = {}
    for path in (path for group in groups for path in group):
        model.get_submodule(path).register_forward_pre_hook(
            lambda _m, args, path=path: seen.update({path: args[0].clone()})
        )
    with torch.no_grad():
        model(**inputs)
    assert len(groups) > 4 and seen.keys() == {path for group in groups for path in group}
    assert any(len(group) > 1 for group in groups) and modulation == {p for p in modulation if "norm" in p}
    for group in groups:
        first, *others = (seen[path] for path in sorted(group))
        assert all(torch.equal(first, other) for other in others), group


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe"), [("AuraFlowTransformer2DModel", "nvfp4"), ("CogVideoXTransformer3DModel", "int4")]
)
def test_a_class_without_a_row_is_quantized_as_it_loads_saved_and_loaded(name, recipe, tmp_path, caplog):
    torch.manual_seed(0)
    config, inputs = CLASSES[name]
    model_class = getattr(diffusers, name)
    model_class.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    how = {"dtype": torch.bfloat16}
    rounded = fluxq.FluxqConfig(recipe=recipe, profile="rtn")
    made = model_class.from_pretrained(tmp_path / "plain", quantization_config=rounded, **how)
    assert f"{name} has no row" in caplog.text and "with a certainty of 9" in caplog.text
    made.save_pretrained(tmp_path / "quantized")
    again = model_class.from_pretrained(tmp_path / "quantized", **how)
    assert sum(isinstance(module, QuantLinear) for module in again.modules()) > 10
    cast = {key: x.bfloat16() if x.ndim > 1 else x for key, x in inputs.items()}
    with torch.no_grad():
        plain = model_class.from_pretrained(tmp_path / "plain", **how)(**cast)[0].float()
        outputs = [model(**cast)[0] for model in (made, again)]
    assert torch.equal(*outputs)
    assert 1e-4 < (outputs[0].float() - plain).norm() / plain.norm() < 0.25


# A pipeline whose transformer has no row


@pytest.fixture(scope="module")
def lumina(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    row = FAMILIES["gemma2"]
    gemma = getattr(transformers, row.model)
    pipe = diffusers.Lumina2Pipeline(
        transformer=diffusers.Lumina2Transformer2DModel(
            sample_size=8,
            in_channels=4,
            hidden_size=128,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=64,
            axes_dim_rope=(16, 24, 24),
            axes_lens=(64, 16, 16),
            cap_feat_dim=TINY_CONFIGS[row.name]["hidden_size"],
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL.from_config({**TINY_CONFIGS["kl"], "latent_channels": 4, "shift_factor": 0.1}),
        text_encoder=gemma(gemma.config_class.from_dict({**TINY_CONFIGS[row.name], "vocab_size": 2048})),
        tokenizer=transformers.AutoTokenizer.from_pretrained(Path(tiny.path()) / "tokenizer_2"),
    )
    folder = tmp_path_factory.mktemp("lumina") / "model"
    pipe.save_pretrained(folder)
    call = {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 16, "system_prompt": "Draw."}
    (folder / "fluxq_generation.json").write_text(json.dumps(call))
    return folder


def run(*arguments: object):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_a_pipeline_without_a_row_is_calibrated_fitted_written_loaded_and_run(lumina, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    Path("quick.yaml").write_text("extends: nvfp4-max\ncalibration: {count: 2, steps: 2}\n")
    done = run("quantize", lumina, "--recipe", "quick.yaml", "-o", "out")
    assert done.exit_code == 0, done.stderr
    assert "Lumina2Transformer2DModel has no row" in caplog.text + done.stderr
    record = json.loads(Path("out", "fluxq_plan.json").read_text())
    (part,) = record["components"]
    assert part["family"] == "generic" and all(group["sqnr_db"] > 5 for group in part["groups"])
    assert record["check"]["passed"] and "has no row" in Path("out", "README.md").read_text()
    pipe = diffusers.DiffusionPipeline.from_pretrained("out", dtype=torch.bfloat16)
    quantized = {name for name, module in pipe.transformer.named_modules() if isinstance(module, QuantLinear)}
    assert quantized == {layer["name"] for layer in part["layers"] if layer["scheme"] != "16bit"}
    assert {"layers.1.attn.to_q", "context_refiner.0.feed_forward.linear_2", "layers.0.norm1.linear"} <= quantized
    pipe.set_progress_bar_config(disable=True)
    call = json.loads((lumina / "fluxq_generation.json").read_text())
    assert torch.isfinite(pipe("a red circle", output_type="latent", **call)[0].float()).all()
    assert run("verify", "out").exit_code == 0


@pytest.mark.slow
def test_a_plan_is_made_and_its_time_is_said_not_to_be_modelled(lumina):
    shown = run("plan", lumina, "--recipe", "fp8")
    assert shown.exit_code == 0 and "outside of the repeated blocks" in shown.stdout
    refused = run("plan", lumina, "--recipe", "fp8", "--gpu", "h200")
    assert refused.exit_code and "generic: its cost is not modelled" in refused.stderr


def test_attention_in_fp8_needs_a_row(lumina, tmp_path):
    (tmp_path / "r.yaml").write_text("extends: fp8\ncomponents: {transformer: {attention: fp8}}\n")
    shown = run("plan", lumina, "--recipe", tmp_path / "r.yaml")
    assert shown.exit_code and "no row says where its self-attention is" in shown.stderr


def test_of_a_folder_the_denoiser_is_found_by_its_name_and_class(lumina, tmp_path):
    folder = ModelFolder("lumina", lumina)
    assert denoisers_of(folder) == ("transformer",)
    assert component_family(folder, "transformer").name == "generic"
    for name in ("text_encoder", "vae"):
        assert component_family(folder, name).kind == name


# Groups are checked where a model runs


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.to_q(x) + self.to_k(text) + self.to_v(text)


GROUP = [["to_q", "to_k", "to_v"]]


def test_a_group_that_reads_two_tensors_is_refused_in_the_first_call_and_not_looked_at_later():
    x = torch.randn(1, 4, 64)
    model = Attention()
    watch_shared_inputs(model, GROUP)
    with pytest.raises(ValueError, match=r"to_k and to_q read different values.*--exclude 'to_k' keeps"):
        model(x, torch.randn(1, 4, 64))
    model(x, torch.randn(1, 4, 64))  # the hooks are gone
    watch_shared_inputs(model, GROUP)
    model(x, x.clone())  # other memory, the same values
    model(x, torch.randn(1, 4, 64))


def test_memory_that_changed_meanwhile_is_another_input():
    class InPlace(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.to_q(x)
            x += 1
            return q + self.to_k(x) + self.to_v(x)

    model = InPlace()
    watch_shared_inputs(model, GROUP)
    with torch.no_grad(), pytest.raises(ValueError, match="to_k and to_q"):
        model(torch.randn(1, 4, 64))


@pytest.mark.slow
def test_a_pipeline_whose_names_mislead_is_refused_before_it_is_fitted(lumina, tmp_path, monkeypatch, quick_recipe):
    def forward(self, attn, *args, **how):
        return stock(self, Crossed(attn), *args, **how)

    class Crossed:
        """An attention whose keys are those of other tokens, under the name of self-attention."""

        def __init__(self, attn: nn.Module) -> None:
            self.attn = attn

        def __getattr__(self, name: str):
            held = getattr(self.attn, name)
            return (lambda x: held(x.flip(1))) if name == "to_k" else held

    processor = diffusers.models.transformers.transformer_lumina2.Lumina2AttnProcessor2_0
    stock = processor.__call__
    monkeypatch.setattr(processor, "__call__", forward)
    options = {"model": str(lumina), "recipe": str(quick_recipe("nvfp4")), "check": False}
    with pytest.raises(ValueError, match=r"attn\.to_k and \S*attn\.to_q read different values") as caught:
        making.quantize(making.job_of(making.JobOptions(output=str(tmp_path / "out"), **options)))
    making.quantize(making.job_of(making.JobOptions(output=str(tmp_path / "rtn"), profile="rtn", **options)))
    excluded = re.findall("--exclude '(.*?)'", str(caught.value))
    assert excluded and excluded[0].endswith(".*.attn.to_k")
    stacks = ("layers", "context_refiner", "noise_refiner")  # of which the message names the first that ran
    everywhere = tuple(f"{stack}.*.attn.to_k" for stack in stacks)
    assert excluded[0] in everywhere
    making.quantize(making.job_of(making.JobOptions(output=str(tmp_path / "out"), exclude=everywhere, **options)))
