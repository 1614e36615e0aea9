"""Read the quantized layers of a fluxq checkpoint with numpy alone; docs/format.md has the reason for each line."""

import json
import re
from functools import reduce
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


E2M1, E4M3, E5M2 = floats(2, 1, 1, 8), floats(4, 3, 7, 127), floats(5, 2, 15, 124)
INT8, INT4 = (np.array([*range(most), *range(-most, 0)], np.float32) for most in (128, 8))
E8M0 = np.array([np.nan, *(2.0**e for e in range(-126, 128)), np.nan], np.float32)  # neither end is ever written
SIZES, PLAIN = {"F32": 4, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BF16": 2, "F16": 2}, ("BF16", "F16", "F32")
# Numbers of the codes, dtype of `weight` and of `weight_scale`, rows and columns that share a scale (0: all of them).
FORMATS = {"fp8": (E4M3, "F8_E4M3", "F32", (1, 0)), "fp8_tensor": (E4M3, "F8_E4M3", "F32", (0, 0))}
FORMATS |= {f"fp8_{tall}x128": (E4M3, "F8_E4M3", "F32", (tall, 128)) for tall in (1, 128)}
FORMATS |= {"fp8_e5m2": (E5M2, "F8_E5M2", "F32", (1, 0)), "mxfp8": (E4M3, "F8_E4M3", "U8", (1, 32))}
FORMATS |= {"nvfp4": (E2M1, "U8", "F8_E4M3", (1, 16)), "mxfp4": (E2M1, "U8", "U8", (1, 32))}
FORMATS |= {"int4": (INT4, "U8", "BF16", (1, 64)), "int4_g128": (INT4, "U8", "BF16", (1, 128))}
INPUTS, FORMATS["int8"] = {*FORMATS, "int8", "16bit"} - {"fp8_128x128"}, (INT8, "I8", "F32", (1, 0))
ROTATIONS = {None: (None, (0,)), "h": (np.array([[1, 1], [1, -1]]), (16, 32, 64, 128))}
ROTATIONS |= {"hr": (1 - 2 * np.eye(4)[::-1], (16, 64, 256))}  # word: of what H is a Kronecker power, sizes
SCHEME = r"(?P<weights>\w+)-(?P<inputs>\w+)(?P<static>-static)?(?P<center>-center)?(?P<smooth>-smooth)?"
SCHEME += r"(-d(?P<d>[1-9]\d{0,5}))?(-(?P<kind>hr?)(?P<size>[1-9]\d{1,2}))?(?P<two>-46)?(-r(?P<r>[1-9]\d{0,5}))?"
FEATURES = {"static_input_scale": "-static", "center": "-center", "smooth": "-smooth", "deflation": "-d"}
FEATURES |= {"hadamard": "-h", "regular_hadamard": "-hr", "four_over_six": "-46", "low_rank": "-r"}
# What stands beside codes and scales: word of the scheme that announces it, and its axes.
PARTS = {"weight_scale_2": ("global", ""), "input_scale": ("static", ""), "pre_quant_mean": ("center", "k")}
PARTS |= {"pre_quant_scale": ("smooth", "k"), "deflate_basis": ("d", "dk"), "deflate_out": ("d", "nd")}
PARTS |= {"svdquant_lora_a": ("r", "rk"), "svdquant_lora_b": ("r", "nr")}


def need(holds, *words):
    if not holds:
        raise ValueError(" ".join(map(str, words)))


def parsed(file, raw=None):
    """Return the JSON object in a file, or in some bytes of it."""
    try:
        return {**json.loads(str(file.read_bytes() if raw is None else raw, "utf-8"))}
    except (OSError, ValueError, TypeError, RecursionError):
        raise ValueError(f"{file} has no JSON object") from None


def open_modules(whole):
    """Return module -> part -> (file, dtype, shape, first byte) of tensors in this file, or in shards in its place."""
    modules, held, index = {}, {}, whole.with_name(f"{whole.name}.index.json")
    files, indices = ({*filter(Path.is_file, whole.parent.glob(f"*.safetensors{end}"))} for end in ("", ".index.json"))
    need(whole not in files if indices == {index} else not indices and files == {whole}, "no single set of", whole)
    for file in sorted(files):
        size, length = file.stat().st_size, int.from_bytes(np.fromfile(file, np.uint8, 8).tobytes(), "little")
        header, at = parsed(file, np.fromfile(file, np.uint8, min(length, size), offset=8).tobytes()), 0
        header.pop("__metadata__", None)
        held |= dict.fromkeys(header, file.name)
        for name, said in header.items():
            lists = [said.get(key) for key in ("data_offsets", "shape")] if isinstance(said, dict) else [None]
            counts = all(isinstance(each, list) and all(type(n) is int and n >= 0 for n in each) for each in lists)
            need(counts and len(lists[0]) == 2 and isinstance(said.get("dtype"), str), name, "is damaged, in", file)
        for name, said in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            (module, _, part), (begin, end), dtype = name.rpartition("."), said["data_offsets"], said["dtype"]
            nbytes = prod(said["shape"]) * SIZES[dtype] if dtype in SIZES else abs(end - begin)
            at_end = begin == at == end - nbytes and part not in modules.setdefault(module, {})
            need(at_end, name, "overlaps, leaves a hole or is there twice, in", file)
            modules[module][part], at = (file, dtype, tuple(said["shape"]), 8 + length + begin), end
        need(8 + length + at == size, file, "is cut off, or has bytes behind its tensors")
    need(not indices or held == parsed(index).get("weight_map"), index, "is of other files")
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
    match = re.fullmatch(SCHEME, text, re.ASCII)
    need(match and match["weights"] in FORMATS, "unknown scheme", text, "of", layer)
    said = match.groupdict() | {"global": match["weights"] == "nvfp4"}
    (first, sizes), (codes, dtype, scale_dtype, (tall, wide)) = ROTATIONS[said["kind"]], FORMATS[said["weights"]]
    d, r, size = (int(said[count] or 0) for count in ("d", "r", "size"))
    inputs = ["nvfp4"] if said["two"] else ["nvfp4", "fp8_tensor"] if said["static"] else INPUTS
    n, columns = (*stored.get("weight", (0, 0, ()))[2], 0, 0)[:2]
    k = columns * (2 if len(codes) == 16 else 1)
    whole = not k % (size or 1) and (tall > 1 or not k % (wide or 1))  # blocks of several rows may be cut off
    need(said["inputs"] in inputs and size in sizes and n and k and whole and d <= k, layer, (n, k), "is not for", text)
    shapes = {"weight": (n, columns, 1)[:axes], "weight_scale": (-(n // -tall), -(k // -wide)) if wide else (n,)[:tall]}
    sizes = {"n": n, "k": k, "d": d, "r": r}
    shapes |= {part: tuple(map(sizes.get, names)) for part, (word, names) in PARTS.items() if said[word]}
    shapes |= {"bias": (n,)} if said["center"] or "bias" in stored else {}
    need(stored.keys() == shapes.keys(), layer, "lacks, or has to no purpose,", stored.keys() ^ shapes.keys())
    held, coded = {}, {"weight": [dtype], "weight_scale": [scale_dtype]}
    for part, shape in shapes.items():
        dtypes = coded.get(part, PLAIN if shape else ["F32"])
        need(stored[part][1] in dtypes and stored[part][2] == shape, layer, part, "should be", *dtypes, shape)
        held[part] = v = numbers(*stored[part], codes if part == "weight" else None)
        need((np.isfinite(v) & ((v > 0) | ("scale" not in part))).all(), layer, part, "holds no number, or no scale")
    scale = held["weight_scale"] * held.get("weight_scale_2", np.float32(1))  # this product first, in fp32
    scale = scale.repeat(tall, 0)[:n].repeat(wide, 1)[:, :k] if wide else scale.reshape(-1, 1)
    w, bias = (decoded := held["weight"].reshape(n, k) * scale).astype(np.float64), held.get("bias")  # fp64 to the end
    if size:
        h = reduce(np.kron, [first] * round(np.log(size) / np.log(len(first))))
        w = (w.reshape(-1, size) @ h).reshape(n, k) / np.sqrt(size)
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
    # folder: of one model, with its config.json. What must be refused is a ValueError.
    config = parsed(Path(folder, "config.json"))
    said, axes = config.get("quantization_config"), 2 if "_class_name" in config else 3
    need(isinstance(said, dict) and said.get("quant_method") == "fluxq", folder, "is not of fluxq")
    version, features, layers = (said.get(key) for key in ("format_version", "required_features", "layers"))
    need(type(version) is int and version == 1, folder, "is of format version", version)
    need(isinstance(layers, dict) and all(isinstance(each, list) for each in layers.values()), "no lists of layers")
    schemes = [(str(name), scheme) for scheme, names in layers.items() for name in names]
    need(0 < len(schemes) == len(dict(schemes)), "no layer, or one that has two schemes")
    needed = sorted(feature for feature, word in FEATURES.items() if any(word in text for _, text in schemes))
    need(isinstance(features, list) and sorted(map(str, features)) == needed, "required_features are not", needed)
    modules = open_modules(Path(folder, f"{'diffusion_pytorch_model' if axes == 2 else 'model'}.safetensors"))
    for module in modules.keys() - dict(schemes).keys():
        is_plain = modules[module].get("weight", (0, "BF16"))[1] in PLAIN
        need(is_plain and not modules[module].keys() & {*PARTS, "weight_scale"}, "no layer announces", module)
    yield from ((name, scheme, *read_layer(name, scheme, modules.get(name, {}), axes)) for name, scheme in schemes)
