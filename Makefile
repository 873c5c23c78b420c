# Every command makes what it needs; the README and .ci/run call these and nothing else.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Without a GPU CUDA kernels, some minutes of nvcc, would be for nothing.
export FASTATTN_NATIVE ?= $(if $(shell command -v nvidia-smi),auto,cpu)

.PHONY: demo test check bench results docs clean
.DELETE_ON_ERROR:

# The main job in three minutes: generate ListOps, train a classifier, test it, plot the curve.
demo: .venv/lra.stamp
	rm -rf demo
	$(BIN)/fastattn-lra generate listops --out demo/data \
	    --min-length 5 --max-length 60 --num-train 40000 --num-val 2000 --num-test 2000
	$(BIN)/fastattn-lra fit --task listops --data-dir demo/data --mixer linear \
	    --recipe listops-demo --out demo/run
	$(BIN)/fastattn-lra test --run demo/run --require-above-floors 5
	@echo
	@echo "The learning curve is demo/run/curve.png. The full-size run, on a GPU:"
	@echo "  $(BIN)/fastattn-lra generate listops --out data/listops"
	@echo "  $(BIN)/fastattn-lra fit --task listops --data-dir data/listops --mixer linear \\"
	@echo "      --recipe listops-budget --out runs/listops-linear"
	@echo "  $(BIN)/fastattn-lra test --run runs/listops-linear"

# A process a core, with one thread each: more would only wait for one another.
test: .venv/dev.stamp .venv/models.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

check: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files csrc tests/native | xargs $(BIN)/clang-format --dry-run -Werror

# Raw numbers to benchmarks/results/<device>/, then docs/benchmarks.md from all that is there.
bench: .venv/bench.stamp
	cd benchmarks && folder=results/$$(../$(BIN)/python -c 'import conftest; print(conftest.slug())') \
	    && mkdir -p $$folder && for file in bench_*.py; do ../$(BIN)/python -m pytest -c pytest.ini \
	    --rootdir=. $$file --benchmark-json=$$folder/$${file%.py}.json || exit 1; done
	$(BIN)/python benchmarks/report.py

# The page of all recorded training runs, their accuracy per root operator, and what a curriculum did.
results: .venv/lra.stamp
	$(BIN)/fastattn-lra report benchmarks/results --out docs/results.md
	$(BIN)/fastattn-lra analyze $$(for run in benchmarks/results/*/lra/listops*/*/; do echo --run $$run; \
	    done) --out docs/results --what roots,curriculum

docs: .venv/dev.stamp
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build

clean:
	rm -rf .venv demo docs/_build build dist src/*.egg-info

# Apart, where only tests find them: beside a torch without CUDA, torchvision does not import, and
# what would like to have it (Lightning) does not either.
.venv/models.stamp: .venv/dev.stamp
	$(INSTALL) --no-deps --target .venv/models timm torchvision peft accelerate psutil
	touch $@

# .venv/<extra>.stamp: the virtual environment holds fastattn[<extra>].
.venv/%.stamp: pyproject.toml constraints.txt setup.py $(wildcard csrc/* csrc/*/* csrc/*/*/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e '.[$*]'
	touch $@
