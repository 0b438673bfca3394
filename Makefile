# Every target sets up what it needs by itself, in .venv.

.PHONY: help demo test test-ci test-thorough test-kernels test-gpu check docs dist clean setup-demo setup-test setup-docs
.ONESHELL:
.SHELLFLAGS := -euc

help:
	@cat <<'END'
	make demo         train a graph network that does not fit in the memory of its (virtual) GPU
	make test         run the tests that say whether umem works here
	make test-ci      run what CI runs: every test but the slow ones, a sample of their cases
	make test-thorough  run every test with all cases: hours
	make test-kernels run those that compare bits, with other kernels of BLAS than this machine's own
	make test-gpu     run those for a GPU on one, with what PYTHON has (python3): needs no network
	make check        run ruff and mypy
	make docs         build the documentation: site/index.html
	make dist         build sdist and wheel in dist/, and try both in empty environments
	make clean        remove .venv, site and the tools' caches

	Each sets up what it needs in .venv, with the first Python from 3.10 on that it finds.
	PYTHON=python3.12 chooses another, when .venv is made.
	END

demo: setup-demo
	@.venv/bin/umem demo $(ARGS)
	[ "$${VIRTUAL_ENV-}" = "$$PWD/.venv" ] ||
		echo 'umem: before these, and before python with umem: . .venv/bin/activate'

# A worker a core, each with one thread for NumPy: more threads would wait for one another. Tests
# start thousands of processes, which would compile umem again without its bytecode.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=$${OMP_NUM_THREADS-1} OPENBLAS_NUM_THREADS=$${OPENBLAS_NUM_THREADS-1} \
	.venv/bin/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal

test: setup-test
	@$(PYTEST) -m "not slow and not gpu and not thorough" $(ARGS)

# Of each thorough test the first case.
CASES := --cases 1

test-ci: setup-test
	@$(PYTEST) -m "not slow and not gpu" $(CASES) $(ARGS)

test-thorough: setup-test
	@$(PYTEST) -m "not gpu" $(ARGS)

# Sums come in another order with each kernel; what is promised to the bit holds with any.
test-kernels: setup-test
	@OPENBLAS_CORETYPE=$$(.venv/bin/python scripts/other_kernel.py)
	if [ -z "$$OPENBLAS_CORETYPE" ]; then
		echo 'umem: this machine has one kind of BLAS kernels' && exit
	fi
	export OPENBLAS_CORETYPE
	echo "umem: with OPENBLAS_CORETYPE=$$OPENBLAS_CORETYPE"
	$(PYTEST) -m "not slow and not gpu and not thorough" -k "bit or bits or exact or exactly" $(ARGS)

# Nothing is set up: a machine with a GPU may have no network, and plugins of its own.
test-gpu:
	@PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $${PYTHON-python3} -m pytest -q -m gpu \
		-o filterwarnings=default $(ARGS)

check: setup-test
	@failed=0
	.venv/bin/python -m ruff check . || failed=1
	.venv/bin/python -m ruff format --check . || failed=1
	.venv/bin/python -m mypy --strict umem umem_software_gpu || failed=1
	exit $$failed

# Not --quiet, which counts no warnings, so that --strict would let them pass.
# The theme's advertisement of its successor, which reads mkdocs.yml too, is off.
docs: setup-docs
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict
	.venv/bin/python scripts/check_site.py
	echo 'umem: built site/index.html'

# ARGS="--python python3.10 python3.13" tries them on these Pythons.
dist: setup-test
	@.venv/bin/python scripts/make_dist.py $(ARGS)

# The mark that .venv is ours to remove, made-by-make, goes last.
clean:
	@[ ! -e .venv/made-by-make ] || { rm -rf .venv/[!m]* && rm -rf .venv; }
	rm -rf site .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.*' -prune -exec rm -rf {} +

setup-demo setup-test setup-docs:
	@sh scripts/setup $(@:setup-%=%)
