import functools
import json
import math

import pytest

from experiments.lm import Config, arguments_of
from replicator.errors import ArgumentError
from tests.experiments.command import ROOT, command, found_by

run = functools.partial(command, "lm", devices=2)
SMALL = [
    *("--layers=1", "--width=16", "--heads=2", "--kv_heads=1", "--context=16"),
    *("--vocabulary=300", "--steps=4", "--global_batch=4"),
]
KEPT = ROOT / "benchmarks" / "weights" / "kept"
TEXT = ["--text=CHANGELOG.md", "--held_out=README.md"]


@pytest.mark.slow
def test_a_run_tests_samples_compares_and_writes_what_the_next_begins_with(
    tmp_path,
):
    out = tmp_path / "model"
    begun = [f"--directory={tmp_path}", *TEXT]
    flags = [*begun, *SMALL, "--strategy=hybrid", "--eval_every=2"]
    done = run(*flags, f"--export={out}", "--remat=dots")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["bits_per_byte"] < 9
    assert 1 < found["gzip_bits_per_byte"] < 8
    assert found["one_device_difference"] < 1e-5
    assert abs(found["bf16_loss"] / found["float32_loss"] - 1) < 0.01
    assert (found["strategy"], found["devices"], found["steps"]) == ("hybrid", 2, 4)
    assert found["compute_dtype"] == "float32"
    assert "--- step 4" in done.stdout
    names = {"config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == names

    tuned = ["--context=16", "--steps=1", "--global_batch=4", "--learning_rate=1e-9"]
    again = found_by("lm", *begun, f"--init_from={out}", *tuned, devices=2)
    assert again["bits_per_byte"] == pytest.approx(found["bits_per_byte"], rel=1e-4)
    assert again["one_device_difference"] is None


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["llama", "gpt2"])
def test_each_layout_trains_cut_by_tensor_parallelism(layout, tmp_path):
    flags = [*TEXT, *SMALL, "--strategy=tensor_parallel", f"--layout={layout}"]
    flags = [flag for flag in flags if not flag.startswith(("--kv", "--vocab"))]
    here = [f"--directory={tmp_path}", "--vocabulary=304", "--compute_dtype=bfloat16"]
    found = found_by("lm", *flags, *here, "--nocompare", devices=2)
    assert math.isfinite(found["bits_per_byte"])
    assert (found["steps"], found["compute_dtype"]) == (4, "bfloat16")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_that_is_saved_goes_on_with_its_tokenizer(tmp_path):
    kept = [f"--checkpoint_dir={tmp_path / 'kept'}", f"--directory={tmp_path}"]
    flags = [*kept, *TEXT, *SMALL, "--nocompare"]
    first = found_by("lm", *flags, devices=2)
    tokenizer = (tmp_path / "kept" / "tokenizer.json").read_bytes()
    found = found_by("lm", *flags, "--steps=6", "--strategy=zero1", devices=2)

    assert (first["steps"], found["steps"]) == (4, 6)
    assert (tmp_path / "kept" / "tokenizer.json").read_bytes() == tokenizer


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"layout": "gpt2", "kv_heads": 1},
            "`--kv_heads` must not come with `--layout",
        ),
        ({"init_from": "x", "width": 64}, "`--width` must not come with `--init_from`"),
        ({"init_from": "x"}, "`--init_from` must be a folder with a whole config.json"),
        (
            {"init_from": str(KEPT / "llama"), "context": 64},
            "`--context` must be at most 32, that of the model in .*, got 64. Use 32",
        ),
    ],
    ids=str,
)
def test_flags_that_do_not_fit_are_refused_by_name(flags, message):
    with pytest.raises(ArgumentError, match=message):
        arguments_of(Config(**flags))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text=nowhere"], "`--text` must hold text, got nowhere"),
        ([f"--export={KEPT / 'gpt2'}"], "`--export` must be a folder that is empty"),
        (
            [f"--init_from={KEPT / 'llama'}", "--context=8"],
            "`--init_from` must hold a ",
        ),
    ],
    ids=str,
)
def test_bad_input_says_what_is_wrong(flags, message, tmp_path):
    done = run(*flags, f"--directory={tmp_path / 'run'}")
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "run").exists()
