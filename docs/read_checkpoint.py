"""Read the quantized layers of a fluxq checkpoint with numpy alone; docs/format.md has the reason for each line.

`read(folder)` yields the weight W (N, K) and bias b (N,) of every y = x W^T + b; the folder holds the config.json and
safetensors files of one model. What must be refused is a ValueError.
"""

import json
import re
from math import prod
from pathlib import Path

import numpy as np


def floats(exponent, mantissa, bias, finite):
    """Return the number of each code of a float, half of them negative; the first `finite` of each half are numbers."""
    code = np.arange(1 << (exponent + mantissa))
    e, f = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    half = np.where(e == 0, np.ldexp(f, 1 - bias), np.ldexp(1 + f, e - bias))
    half[finite:] = np.nan  # infinities too, which no weight is
    return np.concatenate([half, -half]).astype(np.float32)


def sylvester(size):
    """Return Sylvester's Hadamard matrix (size, size), of entries 1 and -1."""
    return np.array([[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)])


E2M1, E4M3, E5M2 = floats(2, 1, 1, 8), floats(4, 3, 7, 127), floats(5, 2, 15, 124)
INT8, INT4 = (np.array([*range(most), *range(-most, 0)], np.float32) for most in (128, 8))
E8M0 = np.array([np.nan, *(2.0**e for e in range(-126, 128)), np.nan], np.float32)  # neither end is ever written
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}  # others are of no layer
PLAIN = ("BF16", "F16", "F32")
# Numbers of the codes, dtype of `weight` and of `weight_scale`, rows and columns that share a scale (0: all of them).
FORMATS = {
    "fp8": (E4M3, "F8_E4M3", "F32", (1, 0)),
    "fp8_tensor": (E4M3, "F8_E4M3", "F32", (0, 0)),
    **{f"fp8_{tall}x128": (E4M3, "F8_E4M3", "F32", (tall, 128)) for tall in (1, 128)},
    "fp8_e5m2": (E5M2, "F8_E5M2", "F32", (1, 0)),
    "mxfp8": (E4M3, "F8_E4M3", "U8", (1, 32)),
    "mxfp4": (E2M1, "U8", "U8", (1, 32)),
    "nvfp4": (E2M1, "U8", "F8_E4M3", (1, 16)),
    "int8": (INT8, "I8", "F32", (1, 0)),
    **{f"int4{more}": (INT4, "U8", "BF16", (1, size)) for more, size in (("", 64), ("_g128", 128))},
}
ROTATIONS = {None: (None, (0,)), "h": (sylvester, (16, 32, 64, 128))}  # word in a scheme: matrix, sizes
SCHEME = re.compile(
    r"(?P<weights>\w+)-(?P<inputs>\w+)(?P<static>-static)?(?P<center>-center)?(?P<smooth>-smooth)?"
    r"(-d(?P<d>[1-9]\d*))?(-(?P<kind>h)(?P<size>\d+))?(?P<two>-46)?(-r(?P<r>[1-9]\d*))?"
)
FEATURES = {"static_input_scale", "center", "smooth", "deflation", "hadamard", "four_over_six", "low_rank"}
# What stands beside codes and scales: word of the scheme that announces it, and its axes.
PARTS = {"weight_scale_2": ("global", ""), "input_scale": ("static", ""), "pre_quant_mean": ("center", "k")}
PARTS |= {"pre_quant_scale": ("smooth", "k"), "deflate_basis": ("d", "dk"), "deflate_out": ("d", "nd")}
PARTS |= {"svdquant_lora_a": ("r", "rk"), "svdquant_lora_b": ("r", "nr")}


def need(holds, *words):
    if not holds:
        raise ValueError(" ".join(map(str, words)))


def open_modules(folder):
    """Return module -> part -> (file, dtype, shape, first byte) of all tensors; only headers are read."""
    modules, files, indices = {}, [*folder.glob("*.safetensors")], [*folder.glob("*.safetensors.index.json")]
    if len(indices) == 1:
        files = [folder / name for name in {*json.loads(indices[0].read_text("utf-8"))["weight_map"].values()}]
    need(len(files) == 1 or len(indices) == 1, folder, "needs one weight file, or one index of several")
    for file in files:
        need(file.parent == folder and file.is_file(), folder, "lacks", file)
        with open(file, "rb") as stream:
            header = json.loads(stream.read(length := int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        for name, said in header.items():
            (module, _, part), (begin, end) = name.rpartition("."), (8 + length + at for at in said["data_offsets"])
            whole = said["dtype"] not in SIZES or end - begin == prod(said["shape"]) * SIZES[said["dtype"]]
            is_new = part not in modules.setdefault(module, {})
            need(whole and is_new and end <= file.stat().st_size, name, "is cut off, damaged or there twice, in", file)
            modules[module][part] = file, said["dtype"], tuple(said["shape"]), begin
    return modules


def numbers(file, dtype, shape, at, codes=None):
    """Read a tensor as fp32; codes: the number of each code, of a quantized weight."""
    raw = np.fromfile(file, np.uint8, prod(shape) * SIZES[dtype], offset=at)
    if codes is None and dtype in PLAIN:
        raw = raw.view("<u2").astype("<u4") << 16 if dtype == "BF16" else raw
        return raw.view("<f2" if dtype == "F16" else "<f4").astype(np.float32).reshape(shape)
    if codes is not None and len(codes) == 16:  # two to a byte, the even column in the low nibble
        return codes[np.stack([raw & 15, raw >> 4], -1)].reshape(shape[0], -1)
    return (codes if codes is not None else E8M0 if dtype == "U8" else E4M3)[raw].reshape(shape)


def read_layer(layer, text, stored, axes):
    """Return decoded codes (N, K), weight (N, K) and bias (N,) or None; text: its scheme, stored: its tensors."""
    match = SCHEME.fullmatch(text)
    need(match and match["weights"] in FORMATS and match["inputs"] in {*FORMATS, "16bit"}, "unknown scheme", text)
    said = match.groupdict() | {"global": match["weights"] == "nvfp4"}
    (matrix, sizes), (codes, dtype, scale_dtype, (tall, wide)) = ROTATIONS[said["kind"]], FORMATS[said["weights"]]
    d, r, size = (int(said[count] or 0) for count in ("d", "r", "size"))
    one_scale = not said["static"] or said["inputs"] in ("nvfp4", "fp8_tensor")
    need(one_scale and (not said["two"] or said["inputs"] == "nvfp4") and size in sizes, "unknown scheme", text)
    n, columns = stored.get("weight", (0, 0, (0, 0)))[2][:2]
    k = columns * 2 if len(codes) == 16 else columns
    whole = tall > 1 or k % (wide or 1) == 0  # blocks of several rows may be cut off
    need(n and k and whole and k % (size or 1) == 0 and d <= k, layer, (n, k), "is not for", text)
    shapes = {"weight": (n, columns, 1)[:axes], "weight_scale": (-(n // -tall), -(k // -wide)) if wide else (n,)[:tall]}
    lengths = {"n": n, "k": k, "d": d, "r": r}
    shapes |= {part: tuple(lengths[axis] for axis in names) for part, (word, names) in PARTS.items() if said[word]}
    shapes |= {"bias": (n,)} if said["center"] or "bias" in stored else {}
    need(stored.keys() == shapes.keys(), layer, "lacks, or has to no purpose,", stored.keys() ^ shapes.keys())
    held, coded = {}, {"weight": [dtype], "weight_scale": [scale_dtype]}
    for part, shape in shapes.items():
        dtypes = coded.get(part, PLAIN if shape else ["F32"])
        need(stored[part][1] in dtypes and stored[part][2] == shape, layer, part, "should be", *dtypes, shape)
        held[part] = numbers(*stored[part], codes if part == "weight" else None)
        sound = np.isfinite(held[part]) & ((held[part] > 0) | ("scale" not in part))
        need(sound.all(), layer, part, "holds what is no number, or no scale")
    scale = held["weight_scale"] * held.get("weight_scale_2", np.float32(1))  # this product first, in fp32
    scale = scale.repeat(tall, 0)[:n].repeat(wide, 1)[:, :k] if wide else scale.reshape(-1, 1)
    decoded = held["weight"].reshape(n, k) * scale
    w, bias = decoded.astype(np.float64), held.get("bias")  # in fp64 to the end
    if matrix:
        w = (w.reshape(-1, size) @ matrix(size)).reshape(n, k) / np.sqrt(size)
    if d:
        w += (held["deflate_out"] - w @ held["deflate_basis"].T) @ held["deflate_basis"].astype(np.float64)
    w *= held.get("pre_quant_scale", 1)
    if said["center"]:
        bias = (bias - w @ held["pre_quant_mean"]).astype(np.float32)
    if r:  # the branch reads x itself
        w += held["svdquant_lora_b"].astype(np.float64) @ held["svdquant_lora_a"]
    return decoded, w.astype(np.float32), bias


def read(folder):
    """Yield (name, scheme, decoded codes (N, K), weight (N, K), bias (N,) or None) of every quantized layer; fp32."""
    config, modules = json.loads(Path(folder, "config.json").read_text("utf-8")), open_modules(Path(folder))
    said, axes = config.get("quantization_config", {}), 2 if "_class_name" in config else 3
    version, features, layers = (said.get(key) for key in ("format_version", "required_features", "layers"))
    need(said.get("quant_method") == "fluxq" and version == 1, folder, "is not of fluxq, or of version", version)
    need(isinstance(features, list) and FEATURES.issuperset(features), "unknown features among", features)
    need(isinstance(layers, dict) and all(isinstance(names, list) for names in layers.values()), "no list of layers")
    schemes = [(name, scheme) for scheme, names in layers.items() for name in names]
    need(0 < len(schemes) == len(dict(schemes)), "no layer, or one that has two schemes")
    for module in modules.keys() - dict(schemes).keys():
        strays = modules[module].keys() & {*PARTS, "weight_scale"}
        is_coded = modules[module].get("weight", (0, "BF16"))[1] not in PLAIN
        need(not strays and not is_coded, "config.json does not announce", module, *strays)
    for name, scheme in schemes:
        yield name, scheme, *read_layer(name, scheme, modules.get(name, {}), axes)
