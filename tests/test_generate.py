"""examples/generate.py: with a cache it generates what it generates without one, token for token."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import reference

PATH = Path(__file__).resolve().parents[1] / "examples" / "generate.py"


def load():
    spec = importlib.util.spec_from_file_location("generate_example", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = load()
PLAIN = example.Config(layers=2, heads=4, kv_heads=4, width=32, hidden=48, vocabulary=64)
CONFIGS = {
    "plain": PLAIN,
    "grouped": replace(PLAIN, kv_heads=2),
    "one key/value head": replace(PLAIN, kv_heads=1),
    "window": replace(PLAIN, window=9),
    "grouped window": replace(PLAIN, kv_heads=2, window=9),
}
MEMORIES = {
    "contiguous": lambda config, samples, capacity: example.Contiguous(config, samples, capacity, np.float32),
    "pages of 16": lambda config, samples, capacity: example.Paged(config, samples, capacity, np.float32, 16),
    "pages of 5": lambda config, samples, capacity: example.Paged(config, samples, capacity, np.float32, 5),
}
SAMPLES, PROMPT, TOKENS = 2, 12, 50


def by_definition(q, k, v, **options):
    return reference.attention(q, k, v, **options).astype(np.float32)


def run(config, memory, temperature, seed=3):
    """Tokens (SAMPLES, TOKENS) after a prompt of random tokens."""
    decoder = example.Decoder(config, example.random_weights(config, seed))
    prompt = np.random.default_rng(seed).integers(0, config.vocabulary, (SAMPLES, PROMPT))
    return np.stack(list(example.generate(decoder, prompt, range(TOKENS), memory, temperature, seed)), axis=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_generation_is_full_recomputation(name, memory, temperature):
    config = CONFIGS[name]
    tokens = run(config, MEMORIES[memory](config, SAMPLES, PROMPT + TOKENS), temperature)
    np.testing.assert_array_equal(tokens, run(config, example.Recomputation(config), temperature))
    np.testing.assert_array_equal(tokens, run(config, example.Recomputation(config, by_definition), temperature))


def test_the_models_differ_and_so_do_the_samples():
    tokens = {name: run(config, example.Recomputation(config), 1.0) for name, config in CONFIGS.items()}
    for one, other in itertools.combinations(tokens.values(), 2):
        assert (one != other).any()
    assert all(len(np.unique(sample)) > 20 for sample in tokens["plain"])
    assert (tokens["plain"][0] != tokens["plain"][1]).any()


@pytest.mark.parametrize("wrong", ["a lost row", "a longer window", "a row twice"])
def test_a_wrong_cache_shows_in_the_tokens(wrong):
    config = CONFIGS["grouped window"]

    class Wrong(example.Contiguous):
        def attend(self, layer, q, k, v):
            if wrong == "a longer window":
                self.window = (config.window, 0)
            if wrong == "a lost row" and self.caches[layer].lengths[0] == 20:
                self.caches[layer].truncate(19)
            if wrong == "a row twice" and self.caches[layer].lengths[0] == 20:
                self.caches[layer].append(k, v)
            return super().attend(layer, q, k, v)

    tokens = run(config, Wrong(config, SAMPLES, PROMPT + TOKENS + 1, np.float32), 1.0)
    assert (tokens != run(config, example.Recomputation(config), 1.0)).any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8])
def test_logits_of_small_caches_are_near(dtype):
    config = CONFIGS["grouped"]
    decoder = example.Decoder(config, example.random_weights(config, 3))
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (SAMPLES, PROMPT))
    exact = decoder.logits(tokens, 0, example.Recomputation(config))
    memory = example.Contiguous(config, SAMPLES, PROMPT, dtype)
    for step in range(PROMPT):
        logits = decoder.logits(tokens[:, step : step + 1], step, memory)
    error = np.abs(logits - exact).max() / exact.std()
    assert 0 < error < {np.float16: 0.01, ml_dtypes.bfloat16: 0.06, np.int8: 0.06}[dtype]


def save_safetensors(path, tensors):
    """Write the format: length of the header, header, data."""
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}
    header, data = {"__metadata__": {"format": "np"}}, b""
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": names[str(array.dtype)], "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_weights_come_back_from_files(tmp_path):
    weights = example.random_weights(PLAIN, 5)
    np.savez(tmp_path / "all.npz", **weights)
    for name, array in example.read_weights([tmp_path / "all.npz"]).items():
        np.testing.assert_array_equal(array, weights[name])
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        stored = {name: array.astype(dtype) for name, array in weights.items()}
        halves = [dict(list(stored.items())[:7]), dict(list(stored.items())[7:])]
        paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
        for path, half in zip(paths, halves, strict=True):
            save_safetensors(path, half)
        read = example.read_weights(paths)
        assert set(read) == set(weights)
        for name, array in read.items():
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, stored[name].astype(np.float32))


def test_sizes_are_read_off_the_weights():
    config = replace(CONFIGS["grouped window"], head_features=16)
    weights = example.random_weights(config, 0)
    assert example.config_of(weights, 4, 9, 10000.0) == config


def test_files_on_the_command_line(tmp_path, capsys):
    weights = example.random_weights(example.Config(layers=1, heads=4, kv_heads=2, width=32, hidden=85), 0)
    del weights["lm_head.weight"]  # tied to the embedding
    path = tmp_path / "model.safetensors"
    save_safetensors(path, weights)
    common = ["--weights", str(path), "--heads", "4", "--tokens", "6", "--prompt-ids", "1", "2", "250"]
    printed = []
    for cache in ("contiguous", "paged", "none"):
        example.main([*common, "--cache", cache])
        out, err = capsys.readouterr()
        printed.append(out)
        assert "generation: 5 tokens" in err
    assert len(set(printed)) == 1
    assert len(printed[0].split()) == 6


def test_random_weights_on_the_command_line(capsys):
    arguments = "--layers 1 --heads 2 --width 16 --kv-heads 1 --tokens 3 --samples 2 --cache-dtype int8"
    example.main(arguments.split())
    out, err = capsys.readouterr()
    assert [len(line.split()) for line in out.splitlines()] == [3, 3]
    assert f"cache: int8, {2 * 19 * 2 * (8 + 4)} bytes, {2 * (8 + 4)} a token" in err


def test_without_rich_there_is_no_bar(monkeypatch):
    for name in ("rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    assert example.with_progress(7) == range(7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokens 0", "--tokens must be at least 1, got 0"),
        ("--window 0", "--window must be at least 1, got 0"),
        ("--kv-heads 3", "heads must divide half the width 256, and kv heads 3 divide them"),
        ("--heads 7", "heads must divide half the width 256"),
        ("--prompt-ids 3 256", "the prompt must hold tokens 0 ... 255, got [3, 256]"),
        ("--weights no.bin", "weights must be .npz or .safetensors files, got no.bin"),
        ("--weights missing.npz", "No such file"),
        ("--cache-dtype float8", "invalid choice"),
        ("--temperature -1", "--temperature must be finite and at least 0, got -1.0"),
        ("--temperature nan", "--temperature must be finite and at least 0, got nan"),
        ("--temperature inf", "--temperature must be finite and at least 0, got inf"),
        ("--rope-theta 0", "--rope-theta must be finite and above 0, got 0.0"),
        ("--tokens 99999999999999", "model and cache must fit the memory: Unable to allocate"),
        ("--tokens 99999999999999 --cache paged", "model and cache must fit the memory: Unable to allocate"),
        ("--tokens 99999999999999999999", "must make fewer than 2**60 numbers"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        example.main(arguments.split())
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]


def test_bfloat16_without_its_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(SystemExit, match="2"):
        example.main(["--cache-dtype", "bfloat16"])
    assert "needs ml_dtypes: pip install 'fastattn[half]'" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows knows no broken pipes")
@pytest.mark.parametrize("tokens", ["2", "4000"])  # less, and more, than a buffer holds
def test_a_closed_pipe_ends_quietly(tokens):
    reader, writer = os.pipe()
    os.close(reader)
    arguments = ["--layers", "1", "--heads", "1", "--width", "4", "--window", "4", "--tokens", tokens]
    here = os.environ | {"PYTHONPATH": str(Path(fastattn.__file__).parents[1])}
    command = [sys.executable, str(PATH), *arguments]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=here, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 1
    assert b"Error" not in done.stderr


def test_weights_of_something_else(tmp_path, capsys):
    weights = example.random_weights(PLAIN, 0)
    path = tmp_path / "model.npz"
    for change, message in (
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"model.layers.1.mlp.up_proj.weight": None}, "up_proj.weight must have shape (48, 32), got none"),
        ({"model.norm.weight": np.ones(5)}, "model.norm.weight must have shape (32,), got (5,)"),
    ):
        np.savez(path, **{name: x for name, x in (weights | change).items() if x is not None})
        with pytest.raises(SystemExit, match="2"):
            example.main(["--weights", str(path), "--heads", "4"])
        assert message in capsys.readouterr().err
    np.savez(path, **weights)
    with pytest.raises(SystemExit, match="2"):
        example.main(["--weights", str(path), "--heads", "5"])
    assert "heads must divide 32 features of queries and fit 32 of keys, got 5" in capsys.readouterr().err
    save_safetensors(tmp_path / "model.safetensors", {"x": np.ones(3, np.int64)})
    with pytest.raises(SystemExit, match="2"):
        example.main(["--weights", str(tmp_path / "model.safetensors")])
    assert "x must be BF16, F16, F32 or F64, got I64" in capsys.readouterr().err
