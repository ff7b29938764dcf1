"""Generate tokens with a decoder in NumPy alone, whose attention and caches are fastattn's.

    python examples/generate.py --tokens 200 --kv-heads 2 --window 64 --cache-dtype int8
    python examples/generate.py --weights model.safetensors --heads 9 --prompt-ids 504 2365 282

The model is of the Llama family: RMS norms, rotary positions, grouped heads, a gated MLP. Its weights come from a seed
(and what it says is noise), or from files with the names that Hugging Face's checkpoints of that family use: sizes are
then read off the shapes, only --heads must be said. The prompt is given as token numbers, or as text whose bytes are
the tokens. Tokens go to standard output, everything else to standard error.

Letters: B samples, H heads, K key/value heads, N tokens at once, S tokens so far, D features of a head, W width.
"""

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastattn import KVCache, PagedKVCache, attention

DTYPES = {"float32": np.float32, "float16": np.float16, "int8": np.int8, "bfloat16": None}
BYTES = 256  # vocabulary of a model without a tokenizer


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder. `window` is how many tokens a token sees, itself included; None is all before it."""

    layers: int = 4
    heads: int = 8
    kv_heads: int = 8
    width: int = 256
    hidden: int = 688
    vocabulary: int = BYTES
    window: int | None = None
    rope_theta: float = 10000.0
    epsilon: float = 1e-5
    head_features: int | None = None

    @property
    def head_dim(self) -> int:
        return self.head_features or self.width // self.heads


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight; matrices are (out, in)."""
    width, hidden = config.width, config.hidden
    q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary, width)}
    for layer in range(config.layers):
        of_layer = {
            "input_layernorm": (width,),
            "self_attn.q_proj": (q_width, width),
            "self_attn.k_proj": (kv_width, width),
            "self_attn.v_proj": (kv_width, width),
            "self_attn.o_proj": (width, q_width),
            "post_attention_layernorm": (width,),
            "mlp.gate_proj": (hidden, width),
            "mlp.up_proj": (hidden, width),
            "mlp.down_proj": (width, hidden),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (config.vocabulary, width)}


def random_weights(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Norms of ones and normally distributed matrices that keep the size of what they multiply."""
    random = np.random.default_rng(seed)
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[1]))
        for name, shape in weight_shapes(config).items()
    }


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The file's tensors: its first 8 bytes are the length of a JSON header that says where each one lies."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        raw = data[start + first : start + last]
        if entry["dtype"] == "BF16":  # the upper half of a float32
            numbers = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] in ("F16", "F32", "F64"):
            numbers = raw.view(f"<f{int(entry['dtype'][1:]) // 8}").astype(np.float32)
        else:
            raise ValueError(f"{path}: {name} must be BF16, F16, F32 or F64, got {entry['dtype']}")
        tensors[name] = numbers.reshape(entry["shape"])
    return tensors


def read_weights(paths: list[Path]) -> dict[str, np.ndarray]:
    """All tensors of .npz and .safetensors files, in float32."""
    tensors: dict[str, np.ndarray] = {}
    for path in paths:
        if path.suffix == ".npz":
            with np.load(path) as archive:
                tensors |= {name: archive[name].astype(np.float32) for name in archive.files}
        elif path.suffix == ".safetensors":
            tensors |= read_safetensors(path)
        else:
            raise ValueError(f"weights must be .npz or .safetensors files, got {path}")
    if "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied
    return tensors


def config_of(tensors: dict[str, np.ndarray], heads: int, window: int | None, rope_theta: float) -> Config:
    """Sizes read off the shapes of weights, which are all checked against them."""
    needed = [name for name in weight_shapes(Config(layers=1)) if name not in tensors]
    if needed:
        raise ValueError(f"weights must be those of a Llama model, but {needed[0]} is missing")
    vocabulary, width = tensors["model.embed_tokens.weight"].shape
    q_width, kv_width = (len(tensors[f"model.layers.0.self_attn.{name}_proj.weight"]) for name in "qk")
    if q_width % heads or kv_width % (q_width // heads):
        raise ValueError(f"heads must divide {q_width} features of queries and fit {kv_width} of keys, got {heads}")
    config = Config(
        layers=sum(name.endswith(".input_layernorm.weight") for name in tensors),
        heads=heads,
        kv_heads=kv_width // (q_width // heads),
        width=width,
        hidden=len(tensors["model.layers.0.mlp.gate_proj.weight"]),
        vocabulary=vocabulary,
        window=window,
        rope_theta=rope_theta,
        head_features=q_width // heads,
    )
    for name, shape in weight_shapes(config).items():
        if name not in tensors or tensors[name].shape != shape:
            came = tensors[name].shape if name in tensors else "none"
            raise ValueError(f"{name} must have shape {shape}, got {came}")
    return config


class Recomputation:
    """No cache: every step computes all tokens anew."""

    cached = False

    def __init__(self, config: Config, function=attention) -> None:
        self.window, self.function = window_of(config), function

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return self.function(q, k, v, causal=True, window=self.window)


class Contiguous:
    """A `KVCache` for each layer."""

    cached = True

    def __init__(self, config: Config, samples: int, capacity: int, dtype) -> None:
        sizes = (samples, config.kv_heads, capacity, config.head_dim)
        self.window = window_of(config)
        self.caches = [KVCache(*sizes, dtype=dtype) for _ in range(config.layers)]

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        self.caches[layer].append(k, v)
        return self.caches[layer].attend(q, window=self.window)


class Paged:
    """A `PagedKVCache` for each layer; the samples have the same numbers in all of them."""

    cached = True

    def __init__(self, config: Config, samples: int, capacity: int, dtype, page_size: int) -> None:
        sizes = (samples * -(-capacity // page_size), page_size, config.kv_heads, config.head_dim)
        self.window = window_of(config)
        self.caches = [PagedKVCache(*sizes, dtype=dtype) for _ in range(config.layers)]
        for cache in self.caches:
            self.sequences = [cache.allocate() for _ in range(samples)]

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        self.caches[layer].append(k, v, self.sequences)
        return self.caches[layer].attend(q, self.sequences, window=self.window)


def window_of(config: Config) -> tuple[int, int] | None:
    return None if config.window is None else (config.window - 1, 0)


class Decoder:
    """The model: tokens in, logits of the next token out."""

    def __init__(self, config: Config, weights: dict[str, np.ndarray]) -> None:
        self.config, self.weights = config, weights

    def logits(self, tokens: np.ndarray, first: int, memory) -> np.ndarray:
        """Logits (B, vocabulary) after tokens (B, N), of which the first stands at position `first`."""
        x = self.weights["model.embed_tokens.weight"][tokens]  # (B, N, W)
        positions = np.arange(first, first + tokens.shape[1])
        for layer in range(self.config.layers):
            x = x + self._attention(layer, self._norm(x, f"model.layers.{layer}.input_layernorm"), positions, memory)
            x = x + self._mlp(layer, self._norm(x, f"model.layers.{layer}.post_attention_layernorm"))
        return self._norm(x[:, -1], "model.norm") @ self.weights["lm_head.weight"].T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + np.float32(self.config.epsilon)) * self.weights[f"{name}.weight"]

    def _attention(self, layer: int, x: np.ndarray, positions: np.ndarray, memory) -> np.ndarray:
        def project(name: str, heads: int) -> np.ndarray:  # (B, heads, N, D), a view
            features = x @ self.weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"].T
            return features.reshape(*x.shape[:2], heads, self.config.head_dim).swapaxes(1, 2)

        q = self._rotate(project("q", self.config.heads), positions)
        k = self._rotate(project("k", self.config.kv_heads), positions)
        out = memory.attend(layer, q, k, project("v", self.config.kv_heads))
        joined = out.swapaxes(1, 2).reshape(*x.shape[:2], -1)
        return joined @ self.weights[f"model.layers.{layer}.self_attn.o_proj.weight"].T

    def _rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Turn feature i together with i + D/2 by an angle proportional to the position (Su et al., 2021)."""
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.config.rope_theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        gate, up, down = (self.weights[f"model.layers.{layer}.mlp.{name}_proj.weight"].T for name in GATED)
        gated = x @ gate
        return (gated * (0.5 + 0.5 * np.tanh(0.5 * gated)) * (x @ up)) @ down  # SiLU, which cannot overflow this way


GATED = ("gate", "up", "down")


def generate(decoder: Decoder, prompt: np.ndarray, steps, memory, temperature: float = 0.0, seed: int = 0):
    """Yield the next token of each sample (B,), once for each of `steps`, after prompt (B, N).

    Temperature 0 takes the likeliest token; others draw, by adding Gumbel noise to the logits.
    """
    random = np.random.default_rng(seed)
    tokens, first = prompt, 0
    for _ in steps:
        logits = decoder.logits(tokens, first, memory)
        if temperature:
            logits = logits / temperature + random.gumbel(size=logits.shape)
        chosen = logits.argmax(axis=-1)
        yield chosen
        if memory.cached:
            first += tokens.shape[1]
            tokens = chosen[:, None]
        else:
            tokens = np.concatenate([tokens, chosen[:, None]], axis=1)


def with_progress(steps: int):
    """range(steps), with a progress bar where rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ModuleNotFoundError:
        return range(steps)
    return track(range(steps), "generating", console=Console(stderr=True))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--weights", type=Path, nargs="+", default=[], help=".npz or .safetensors files (default: random weights)")
    add("--seed", type=int, default=0, help="of the random weights and of drawn tokens")
    add("--layers", type=int, default=4, help="of random weights")
    add("--width", type=int, default=256, help="of random weights")
    add("--kv-heads", type=int, help="of random weights (default: as many as heads)")
    add("--heads", type=int, default=8, help="query heads (default 8)")
    add("--window", type=int, help="tokens that a token sees, itself included (default: all)")
    add("--rope-theta", type=float, default=10000.0, help="base of the rotary positions (default 10000)")
    add("--prompt", default="Once upon a time", help="its bytes are the tokens")
    add("--prompt-ids", type=int, nargs="+", help="tokens as numbers")
    add("--tokens", type=int, default=200, help="tokens to generate (default 200)")
    add("--samples", type=int, default=1, help="continuations at once (default 1)")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    add("--cache", choices=["contiguous", "paged", "none"], default="contiguous", help="none computes all anew")
    add("--cache-dtype", choices=list(DTYPES), default="float32")
    add("--page-size", type=int, default=16, help="tokens of a page (default 16)")
    given = parser.parse_args(arguments)
    for name in ("layers", "heads", "width", "tokens", "samples", "page_size", "window", "kv_heads"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(given, name)}")
    if not 0 <= given.temperature < math.inf:
        parser.error(f"--temperature must be finite and at least 0, got {given.temperature}")
    if not 0 < given.rope_theta < math.inf:
        parser.error(f"--rope-theta must be finite and above 0, got {given.rope_theta}")
    try:
        prepare(given)
    except MemoryError as error:
        parser.error(f"model and cache must fit the memory: {error}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return given


def prepare(given: argparse.Namespace) -> None:
    """Add what the arguments stand for: model, prompt, cache."""
    if given.weights:
        weights = read_weights(given.weights)
        config = config_of(weights, given.heads, given.window, given.rope_theta)
    else:
        kv_heads = given.kv_heads or given.heads
        if given.width % (2 * given.heads) or given.heads % kv_heads:
            raise ValueError(f"heads must divide half the width {given.width}, and kv heads {kv_heads} divide them")
        config = Config(
            layers=given.layers, heads=given.heads, kv_heads=kv_heads, width=given.width,
            hidden=8 * given.width // 3, window=given.window, rope_theta=given.rope_theta,
        )  # fmt: skip
        weights = random_weights(config, given.seed)
    prompt = given.prompt_ids or list(given.prompt.encode())
    if not prompt or not 0 <= min(prompt) <= max(prompt) < config.vocabulary:
        raise ValueError(f"the prompt must hold tokens 0 ... {config.vocabulary - 1}, got {prompt}")
    given.decoder, given.prompt = Decoder(config, weights), np.tile(prompt, (given.samples, 1))
    capacity = len(prompt) + given.tokens
    if given.cache_dtype == "bfloat16":
        try:
            import ml_dtypes
        except ModuleNotFoundError:
            raise ValueError("--cache-dtype bfloat16 needs ml_dtypes: pip install 'fastattn[half]'") from None
        DTYPES["bfloat16"] = ml_dtypes.bfloat16
    dtype = DTYPES[given.cache_dtype]
    if given.cache == "none":
        given.memory = Recomputation(config)
    elif given.cache == "paged":
        given.memory = Paged(config, given.samples, capacity, dtype, given.page_size)
    else:
        given.memory = Contiguous(config, given.samples, capacity, dtype)


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    began = time.perf_counter()
    stream = generate(
        given.decoder, given.prompt, with_progress(given.tokens), given.memory, given.temperature, given.seed
    )
    generated = [next(stream)]
    prompt_seconds = time.perf_counter() - began
    generated += stream
    seconds = time.perf_counter() - began - prompt_seconds
    for sample in np.stack(generated, axis=1):
        print(*sample)
    n_prompt, n_more = given.prompt.size, given.samples * (given.tokens - 1)
    print(f"prompt: {n_prompt} tokens, {n_prompt / prompt_seconds:.0f} tokens/s", file=sys.stderr)
    if n_more:
        print(f"generation: {n_more} tokens, {n_more / seconds:.0f} tokens/s", file=sys.stderr)
    if given.memory.cached:
        n_bytes = sum(cache.nbytes for cache in given.memory.caches)
        rows = given.samples * (given.prompt.shape[1] + given.tokens)
        print(f"cache: {given.cache_dtype}, {n_bytes} bytes, {n_bytes / rows:.0f} a token", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has had enough; what is left must not be tried again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
