# `make train` and `make test` do all their own set-up. `make help` lists the rest.

PYTHON    ?= python3
PY        := .venv/bin/python
ARGS      ?=
# What `make quick` compares with: a revision; where main and this branch part.
BASE      ?=
# Read once, when NumPy is imported: else its BLAS threads poll after each product, in the way of torch's.
export OPENBLAS_THREAD_TIMEOUT ?= 4
# Empty: Python caches bytecode. Without the cache each test process spends 15 s more on rewriting the assertions of tests.
export PYTHONDONTWRITEBYTECODE :=
# Test processes: one a core, but no more than a handful; each then computes with its share of the cores.
JOBS      ?= $(shell $(PYTHON) -c "import os; print(min(os.cpu_count() or 1, 8))")

# What runs again with no call of a layer replayed (the suite replays them): every test of graphs, checkpointing, offload,
# compile, debugging and parallelism, found by a word of its name, its file's or its folder's, and what layers compute.
INTERPRETED := tests/torch tests/debug tests/parallel -k "graph or captur or microbatch or checkpoint or recomput or \
	offload or hook or compil or traced or operators or torch_export or debug or inspect or precision or parallel or rank or \
	ddp or fsdp or column or test_modules or layer_wiring or multihead or transformer_layer or grouped or golden or \
	dynamic_sizes or autocast or module_paths or a_program or residual or handovers or test_rope or attention_choice or nonfinite or \
	training or memory_report or examples or userbuffers or a_cache or unusual"

# make gpu (SHARD=none: no tests; GPU_FLAGS: tools/gpu_run.py --help, such as --limit 540 --pack --mutants). It leaves a
# record of the suite's run beside the benchmarks' results: OUT/...-suite.json, to be committed in benchmarks/results.
WHEELS    ?= .whl
SHARD     ?= 1/1
BENCH     ?= gemm norms quantize modules attention attention_kernels training
OUT       ?= build/gpu
GPU_FLAGS ?=
PICKED    :=

.PHONY: help env train test quick quick-map test-more test-full test-interpreted format check bench wheels release docs site mutants gpu gpu-interpreted gpu-ranks clean

help:  ## this list
	@grep -E '^[a-z-]+: .*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

env:  ## create or refresh .venv (every other target but gpu does it by itself)
	@$(PYTHON) tools/setup_env.py

train: env  ## train a small GPT in FP8 on the shipped text (ARGS="--help" lists its options)
	STARTED_BY="make train" exec $(PY) -m te_cli train $(ARGS)

test: env  ## run the tests of every change (ARGS="tests/core -k gemm" picks some)
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

quick: env  ## three minutes on two cores: a fixed fifth of `make test`, changed tests, and what `make quick-map` knows
	@mkdir -p build
	$(PY) tools/touched.py $(BASE) > build/touched.txt
	$(PY) -m pytest -n $(JOBS) --dist worksteal --shard=1/5 --also=build/touched.txt $(ARGS)

quick-map: env  ## record which cases enter which functions, for `make quick`: `make test` at half its speed, now and then
	rm -rf build/touched
	$(PY) -m pytest -p tools.touched -n $(JOBS) --dist worksteal $(ARGS)

test-more:  ## run what CI adds: programs of others on this package, compilers, four ranks, a part without replays
	@$(PYTHON) tools/setup_env.py clients onnx wheels
	@$(PYTHON) tools/browser.py
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m more $(ARGS)
	$(if $(ARGS),,@$(MAKE) test-interpreted ARGS=--shard=1/4)

test-interpreted: env  ## run tests with no call of a layer replayed (`make test-more`: a fourth of them; ARGS adds to it)
	TE_CORE_TAPES=never $(PY) -m pytest -n $(JOBS) --dist worksteal $(INTERPRETED) $(ARGS)

test-full:  ## run everything, before a release: whole matrices, fuzzing at length, every fault (hours)
	@$(PYTHON) tools/setup_env.py clients onnx wheels
	@$(PYTHON) tools/browser.py
	$(PY) -m pytest -n $(JOBS) --dist worksteal --more --full $(ARGS)
	@$(MAKE) test-interpreted
	$(PY) -m tests.layer_draws 5000
	$(PY) -m tests.broken_entries 300000
	@$(MAKE) mutants

format: env  ## lay out every Python file as `make check` wants it
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

check: env  ## layout, lint, types, floors and circles of imports, sizes, documents, every kernel compiled
	$(PY) tools/check.py $(ARGS)

bench: env  ## run the benchmarks named in BENCH="gemm norms ..." into benchmarks/results
	$(PY) -m benchmarks.run $(BENCH) --out benchmarks/results

wheels: env  ## build the sources' archive, the wheel that runs anywhere, and wheels with the C library, into dist
	@$(PYTHON) tools/setup_env.py wheels
	$(PY) tools/wheels.py $(ARGS)

release: wheels  ## that, then look at the files, and run the wheel in a fresh environment of each of PYTHONS="python3.10 ..."
	$(PY) tools/release.py dist $(if $(PYTHONS),--pythons $(PYTHONS))

docs: env  ## refresh the generated parts of the documents, run their examples, follow their links
	$(PY) tools/docs.py $(ARGS)

site:  ## build the documents and the reference as pages for a browser, into build/site/html; fail where a link is broken
	@$(PYTHON) tools/setup_env.py site
	$(PY) -m tools.website

mutants: env  ## apply each fault of tests/mutants.toml in turn; fail if the tests let one live
	$(PY) tools/mutants.py --jobs $(JOBS) $(ARGS)

gpu:  ## on a GPU machine, offline, with the PYTHON= that is there: SHARD=i/n of the tests, then BENCH="..."
	$(PYTHON) tools/gpu_run.py --wheels "$(WHEELS)" --shard $(SHARD) --bench "$(BENCH)" --out "$(OUT)" \
		$(GPU_FLAGS) --require-cuda -- $(PICKED) $(ARGS)

gpu-interpreted: export TE_CORE_TAPES = never
gpu-interpreted: PICKED = $(INTERPRETED)
gpu-interpreted: BENCH =
gpu-interpreted: gpu  ## on a GPU machine: what `make test-interpreted` runs, with a record of its own

gpu-ranks: export TE_TESTS_RANKS_SHARE = 1
gpu-ranks: PICKED = tests/parallel -k "GPUs or first_forward_in_a_capture or update_in_a_graph" --dist loadfile
gpu-ranks: BENCH =
gpu-ranks: gpu  ## on a machine with one GPU: the tests of ranks over NCCL, which share it, with a record of its own

clean:  ## remove what was built and cached (.venv stays)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
