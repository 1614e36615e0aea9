"""Original names against diffusers' own converters: what is joined by our rows is read as the very same tensors."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.keymap_rows import Rule, compiled
from fluxq.recipes.keymaps import CHECKPOINT_PREFIX, ORIGINALS, Joined, diffusers_names, original_names
from tests.recipes.test_families import FULL_SIZE, VARIANTS, on_meta

DENOISERS = [row for row in FAMILIES.values() if row.kind == "transformer"]
FEW_LAYERS = {  # of the published width, which two converters have built in
    **{name: {"num_layers": 2, "num_single_layers": 2} for name in ("flux", "flux2", "chroma")},
    "hunyuan_video": {"num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 2},
    "pixart": {"num_layers": 2, "caption_channels": 4096},
    "z_image": {"n_layers": 2},
    "unet": {},
}
MORE_VARIANTS = [  # than the Linears of a family differ by
    ("wan", {"image_dim": 64, "added_kv_proj_dim": 5120, "pos_embed_seq_len": 514}),  # from first and last frame
    ("sd3", {"dual_attention_layers": [0], "qk_norm": "rms_norm"}),  # 3.5 medium
    ("unet", {"layers_per_block": 1}),
    ("unet", {"down_block_types": ["CrossAttnDownBlock2D"] * 3, "up_block_types": ["CrossAttnUpBlock2D"] * 3}),
]
CASES = [(row.name, {}) for row in DENOISERS] + VARIANTS + MORE_VARIANTS
CASES = [case for case in CASES if case[0] in ORIGINALS]
UNREAD = [  # what a converter does not know; `KNOWN` has their names
    ("sana", {"guidance_embeds": True}),  # Sprint
    ("wan", {"pos_embed_seq_len": 514}),
    ("pixart", {}),  # has none
]
UNJOINED = {"hunyuan_video": "txt_in.individual_token_refiner.blocks."}  # kept in 16 bit

READ = [
    (name, config)
    for name, config in CASES
    if not any(name == other and config.items() >= part.items() for other, part in UNREAD)
]


def cases(given: list[tuple[str, dict]]) -> Any:
    """A test for each, by the name of the family and of what its configuration says otherwise."""
    ids = ["-".join((name, *config)) for name, config in given]
    return pytest.mark.parametrize(("name", "config"), given, ids=ids)


def shapes(name: str, config: dict) -> dict[str, int]:
    """Tensor -> N of a published model cut to a few layers."""
    few = FEW_LAYERS.get(name, {"num_layers": 2})
    state = on_meta(FAMILIES[name], {**FULL_SIZE.get(name, {}), **few, **config}).state_dict()
    return {key: value.shape[0] for key, value in state.items()}


def random_state(name: str, config: dict) -> dict[str, torch.Tensor]:
    """Of the published height; two columns are enough, since tensors are joined along N only."""
    noise = torch.Generator().manual_seed(0)
    return {key: torch.randn(n, 2, generator=noise) for key, n in shapes(name, config).items()}


def rules_of(name: str) -> tuple[Rule, ...]:
    """The rows of a family, if they are the same for every model of it."""
    rules = ORIGINALS[name]
    return rules if isinstance(rules, tuple) else ()


def joined(name: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for original, parts, order in original_names(name, state.keys()):
        rows = torch.cat([state[part] for part in parts])
        found[original] = torch.cat(rows.chunk(2)[::-1]) if order == "halves swapped" else rows
    return found | {rule.original: torch.zeros(1) for rule in rules_of(name) if not rule.parts}


def check_against_the_converter(name: str, config: dict) -> None:
    state = random_state(name, config)
    original = joined(name, state)
    if name in ("flux", "unet"):  # as one file of a whole pipeline has it
        original = {CHECKPOINT_PREFIX + key: value for key, value in original.items()}
    convert = SINGLE_FILE_LOADABLE_CLASSES[FAMILIES[name].model]["checkpoint_mapping_fn"]
    model: Any = on_meta(
        FAMILIES[name], {**FULL_SIZE.get(name, {}), **FEW_LAYERS.get(name, {"num_layers": 2}), **config}
    )
    read = convert(original, config=dict(model.config))
    assert read.keys() == state.keys()
    assert [key for key, value in state.items() if not torch.equal(read[key], value)] == []


@pytest.mark.often(8)
@cases(READ)
def test_diffusers_reads_the_original_names_as_the_same_tensors(name, config):
    check_against_the_converter(name, config)


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("flux", "double_blocks.*.img_attn.qkv"),
        ("flux", "double_blocks.*.txt_mlp.0"),
        ("flux", "final_layer.adaLN_modulation.1"),
        ("flux2", "double_blocks.*.txt_attn.qkv"),
        ("chroma", "single_blocks.*.linear1"),
        ("sd3", "joint_blocks.*.context_block.adaLN_modulation.1"),
        ("z_image", "*.*.attention.qkv"),
        ("sana", "blocks.*.cross_attn.kv_linear"),
        ("hunyuan_video", "txt_in.individual_token_refiner.blocks.*.self_attn_qkv"),
        ("wan", "blocks.*.self_attn.q"),
        ("ltx", "transformer_blocks.*.attn1.q_norm"),
    ],
)
def test_a_planted_swap_is_seen(name, original, monkeypatch):
    def planted(rule: Rule) -> Rule:
        if rule.original != original:
            return rule
        if len(rule.parts) > 1:
            return rule._replace(parts=rule.parts[::-1])
        if "adaLN" in original:
            return rule._replace(order="as they are" if rule.order == "halves swapped" else "halves swapped")
        return rule._replace(order="halves swapped")

    monkeypatch.setitem(ORIGINALS, name, tuple(map(planted, rules_of(name))))
    with pytest.raises(AssertionError):
        check_against_the_converter(name, {})


@pytest.mark.often(2)
@cases(CASES)
def test_the_way_back_is_the_inverse(name, config):
    names = list(shapes(name, config))
    found = original_names(name, names)
    assert sorted(part for each in found for part in each.parts) == sorted(names)  # each of them once
    originals = [each.original for each in found]
    assert len(set(originals)) == len(originals)
    assert diffusers_names(name, originals) == found
    whole = ["vae.decoder.conv_in.weight", *(CHECKPOINT_PREFIX + original for original in originals)]
    assert diffusers_names(name, whole) == found


@pytest.mark.slow
def test_every_name_of_every_published_model_maps():
    for family in DENOISERS:
        if family.name in ORIGINALS:
            names = list(on_meta(family, FULL_SIZE.get(family.name, {})).state_dict())
            assert sum(len(each.parts) for each in original_names(family.name, names)) == len(names), family.name


@pytest.mark.slow
def test_every_row_is_some_model_s():
    seen: dict[str, set[str]] = {}
    for name, config in CASES:
        found = original_names(name, list(shapes(name, config)))
        seen.setdefault(name, set()).update(each.original for each in found)
    for name in ORIGINALS:
        for rule in rules_of(name):
            used = any(compiled(rule.original).fullmatch(original) for original in seen[name])
            assert used or not rule.parts, (name, rule)


@pytest.mark.often(10)
@cases(CASES)
def test_what_an_original_tensor_joins_is_one_group_that_says_so(name, config):
    family, joins = FAMILIES[name], 0
    for original, parts, _ in original_names(name, list(shapes(name, config))):
        layers = [part.rpartition(".")[0] for part in parts]
        if len(layers) < 2 or original.startswith(UNJOINED.get(name, "nothing")):
            assert all(family.kept(layer) for layer in layers if len(layers) > 1), original
            continue
        located = {found for layer in layers if (found := family.locate(layer))}
        assert len(located) == 1, original
        group, block = next(iter(located))
        assert group.joined and [f"{block}.{member}" for member in group.members] == layers, original
        joins += 1
    assert joins or name in ("qwen_image", "wan", "ltx", "hidream", "unet")


KNOWN = {  # names as the authors' own code has them, one model each
    "flux": {
        "img_in.weight": ["x_embedder.weight"],
        "double_blocks.1.txt_attn.norm.key_norm.scale": ["transformer_blocks.1.attn.norm_added_k.weight"],
        "single_blocks.1.linear1.bias": [
            *(f"single_transformer_blocks.1.attn.to_{part}.bias" for part in "qkv"),
            "single_transformer_blocks.1.proj_mlp.bias",
        ],
    },
    "wan": {
        "blocks.1.norm3.weight": ["blocks.1.norm2.weight"],
        "blocks.1.cross_attn.o.bias": ["blocks.1.attn2.to_out.0.bias"],
        "head.modulation": ["scale_shift_table"],
        "img_emb.emb_pos": ["condition_embedder.image_embedder.pos_embed"],
    },
    "pixart": {
        "x_embedder.proj.weight": ["pos_embed.proj.weight"],
        "t_block.1.bias": ["adaln_single.linear.bias"],
        "t_embedder.mlp.2.weight": ["adaln_single.emb.timestep_embedder.linear_2.weight"],
        "csize_embedder.mlp.0.weight": ["adaln_single.emb.resolution_embedder.linear_1.weight"],
        "ar_embedder.mlp.0.weight": ["adaln_single.emb.aspect_ratio_embedder.linear_1.weight"],
        "y_embedder.y_proj.fc1.weight": ["caption_projection.linear_1.weight"],
        "blocks.1.attn.qkv.bias": [f"transformer_blocks.1.attn1.to_{part}.bias" for part in "qkv"],
        "blocks.1.attn.proj.weight": ["transformer_blocks.1.attn1.to_out.0.weight"],
        "blocks.1.cross_attn.q_linear.weight": ["transformer_blocks.1.attn2.to_q.weight"],
        "blocks.1.cross_attn.kv_linear.weight": [f"transformer_blocks.1.attn2.to_{part}.weight" for part in "kv"],
        "blocks.1.cross_attn.proj.bias": ["transformer_blocks.1.attn2.to_out.0.bias"],
        "blocks.1.mlp.fc1.weight": ["transformer_blocks.1.ff.net.0.proj.weight"],
        "blocks.1.mlp.fc2.weight": ["transformer_blocks.1.ff.net.2.weight"],
        "blocks.1.scale_shift_table": ["transformer_blocks.1.scale_shift_table"],
        "final_layer.scale_shift_table": ["scale_shift_table"],
        "final_layer.linear.bias": ["proj_out.bias"],
    },
    "sana": {
        "t_embedder.mlp.0.weight": ["time_embed.timestep_embedder.linear_1.weight"],  # of Sprint alone
        "cfg_embedder.mlp.2.bias": ["time_embed.guidance_embedder.linear_2.bias"],
        "blocks.0.cross_attn.k_norm.weight": ["transformer_blocks.0.attn2.norm_k.weight"],
    },
    "qwen_image": {"transformer_blocks.1.img_mod.1.weight": ["transformer_blocks.1.img_mod.1.weight"]},
    "hidream": {
        "double_stream_blocks.1.block.ff_i.gate.weight": ["double_stream_blocks.1.block.ff_i.gate.weight"],
    },
    "unet": {
        "input_blocks.8.1.transformer_blocks.9.attn2.to_k.weight": [
            "down_blocks.2.attentions.1.transformer_blocks.9.attn2.to_k.weight"
        ],
        "output_blocks.2.2.conv.weight": ["up_blocks.0.upsamplers.0.conv.weight"],
        "output_blocks.8.0.skip_connection.bias": ["up_blocks.2.resnets.2.conv_shortcut.bias"],
        "input_blocks.6.0.op.weight": ["down_blocks.1.downsamplers.0.conv.weight"],
        "label_emb.0.2.weight": ["add_embedding.linear_2.weight"],
    },
}


@pytest.mark.parametrize("name", KNOWN)
def test_names_as_the_authors_have_them(name):
    variants = {
        "wan": MORE_VARIANTS[0][1],
        "pixart": {"use_additional_conditions": True},
        "sana": {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"},
    }
    found = {
        each.original: list(each.parts) for each in original_names(name, list(shapes(name, variants.get(name, {}))))
    }
    assert {original: found.get(original) for original in KNOWN[name]} == KNOWN[name]


def test_modules_and_what_is_stored_for_them_follow_the_same_rows():
    layers = [f"transformer_blocks.3.attn.to_{part}" for part in "qkv"]
    for suffix in ("", ".weight_scale", ".weight_scale_2", ".input_scale"):
        parts = tuple(layer + suffix for layer in layers)
        assert original_names("flux", parts) == [Joined(f"double_blocks.3.img_attn.qkv{suffix}", parts)]


def test_what_diffusers_does_not_hold_has_no_parts():
    names = ["x_embedder.proj.weight", "pos_embed", "y_embedder.y_embedding"]
    assert [each.parts for each in diffusers_names("pixart", names)] == [("pos_embed.proj.weight",), (), ()]


def refusal(of: Iterable[str], family: str = "flux", back: bool = False) -> str:
    with pytest.raises(ValueError) as caught:
        (diffusers_names if back else original_names)(family, list(of))
    return str(caught.value)


def test_what_has_no_row_is_named():
    assert refusal(["x"], "t5").startswith("no original names are known for 't5' (known: flux, ")
    assert "no original name is known for 'x_embedder.lora.weight'" in refusal(["x_embedder.lora.weight"])
    assert "no name in diffusers is known for 'x_embedder.weight'" in refusal(["x_embedder.weight"], back=True)
    assert "'transformer_blocks.0.attn.to_v.bias' is missing; give the names of the whole model" in refusal(
        [f"transformer_blocks.0.attn.to_{part}.bias" for part in "qk"]
    )
    assert "neither 'down_blocks.0.resnets.0.conv1'" in refusal(["conv_in.weight"], "unet")
    assert "no name in diffusers is known for 'input_blocks.19.0.op'" in refusal(
        ["input_blocks.3.0.op", "input_blocks.19.0.op"], "unet", back=True
    )


def test_every_denoiser_has_original_names():
    assert ORIGINALS.keys() == {row.name for row in DENOISERS}
