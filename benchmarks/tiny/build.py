"""The untrained parts of the embedded pipeline: small stock diffusers, transformers and open_clip models.

All quantizable linears of the transformer read 128, 512 or 640 features: multiples of 128, the largest
block of any number format here.
"""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# diffusers and transformers fill their top level lazily, which a type checker takes for private names, and
# annotate their configurations narrower than what they take.

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.tiny import data

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

TEXT_TOKENS = 8  # "a red three on black" is five words, an end and, for CLIP, a start


def transformer() -> FluxTransformer2DModel:
    """One double and four single blocks of width 128; every modulation starts at zero (adaLN-zero)."""
    import torch
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=4,
        attention_head_dim=64,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        guidance_embeds=False,
        axes_dims_rope=(16, 24, 24),
    )
    for name, parameter in model.named_parameters():
        if ".norm1.linear." in name or ".norm1_context.linear." in name or ".norm.linear." in name:
            torch.nn.init.zeros_(parameter)
        elif name.startswith(("norm_out.linear", "proj_out")):
            torch.nn.init.zeros_(parameter)
    return model


def autoencoder() -> AutoencoderKL:
    """(B, 3, 16, 16) to four channels of 8 x 8, of which the pipeline packs 2 x 2 into a token."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=data.SIZE,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def t5_tokenizer() -> T5Tokenizer:
    """A unigram tokenizer in which every word of the grammar is one token; letters spell other words."""
    from transformers import T5Tokenizer

    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -12.0)]
    vocabulary += [("▁" + word, -2.0) for word in data.words()]
    vocabulary += [(letter, -10.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=TEXT_TOKENS)


def clip_tokenizer() -> CLIPTokenizer:
    """A byte-pair tokenizer in which every word of the grammar is one token.

    The end of text has the highest number: open_clip pools at the highest token, CLIPTextModel at the first
    end (but at the highest token where the end has the number 2, a legacy rule that must not apply here).
    """
    from transformers import CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*letters, *(letter + "</w>" for letter in letters)]
    merges: list[tuple[str, str]] = []
    for word in data.words():
        pieces = [*word[:-1], word[-1] + "</w>"]
        _merge(pieces, tokens, merges)
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TEXT_TOKENS)


def _merge(pieces: list[str], tokens: list[str], merges: list[tuple[str, str]]) -> None:
    """Apply the known merges to a word, in their order, then add those that make it one token."""
    for pair in merges:
        at = 0
        while at < len(pieces) - 1:
            if (pieces[at], pieces[at + 1]) == pair:
                pieces[at : at + 2] = [pair[0] + pair[1]]
            at += 1
    while len(pieces) > 1:
        merges.append((pieces[0], pieces[1]))
        pieces[:2] = [pieces[0] + pieces[1]]
        tokens.append(pieces[0])


def t5_encoder() -> T5EncoderModel:
    """One layer of width 64: the words of a caption, (B, 8) tokens to (B, 8, 64)."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(t5_tokenizer()),
        d_model=64,
        d_kv=32,
        d_ff=128,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        tie_word_embeddings=True,
    )
    return T5EncoderModel(config)


def clip_text_encoder() -> CLIPTextModel:
    """One layer of width 64: the pooled caption, (B, 8) tokens to (B, 64)."""
    from transformers import CLIPTextConfig, CLIPTextModel

    tokenizer = clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        projection_dim=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=TEXT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def pipeline(transformer, autoencoder, t5_encoder, clip_text_encoder) -> FluxPipeline:
    """The stock pipeline of trained parts."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=autoencoder,
        text_encoder=clip_text_encoder,
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_encoder,
        tokenizer_2=t5_tokenizer(),
        transformer=transformer,
    )


CLIP_CONFIG = {
    "model_cfg": {
        "embed_dim": 64,
        "vision_cfg": {"image_size": data.SIZE, "layers": 4, "width": 96, "head_width": 32, "patch_size": 4},
        "text_cfg": {
            "context_length": TEXT_TOKENS,
            "vocab_size": len(data.words()),
            "width": 64,
            "heads": 2,
            "layers": 1,
            "hf_tokenizer_name": ".",
        },
    },
    "preprocess_cfg": {
        "size": data.SIZE,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    },
}


def clip_config() -> dict:
    """The open_clip configuration, `open_clip_config.json`."""
    import copy

    config = copy.deepcopy(CLIP_CONFIG)
    config["model_cfg"]["text_cfg"]["vocab_size"] = len(clip_tokenizer())
    return config


def clip_model(folder: Path):
    """An untrained open_clip model; writes its configuration and tokenizer into `folder`."""
    import json

    import open_clip

    folder.mkdir(parents=True, exist_ok=True)
    config = clip_config()
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    clip_tokenizer().save_pretrained(folder)
    return open_clip.CLIP(**config["model_cfg"])
