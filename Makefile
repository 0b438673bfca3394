# Every target sets up what it needs by itself, in .venv.

# The tests hold what umem assumes against CuPy itself, which imports without a GPU.
CUPY := "cupy-cuda12x>=14.0" cuda-core "cuda-bindings==12.*"

# The mark that .venv is ours to remove, made-by-make, goes last.
EMPTY := rm -rf .venv/[!m]*

.PHONY: help demo test test-all check clean setup-demo setup-test
.ONESHELL:
.SHELLFLAGS := -euc

help:
	@cat <<'END'
	make demo      train a graph network that does not fit in the memory of its (virtual) GPU
	make test      run the tests that say whether umem works here
	make test-all  run every test but the slow ones and those for a GPU; for these:
	make test ARGS="-m slow", and, one after another, make test ARGS="-m gpu -n 0"
	make check     run ruff and mypy
	make clean     remove .venv and the tools' caches

	Each sets up what it needs in .venv, with the first Python from 3.10 on that it finds.
	PYTHON=python3.12 chooses another, when .venv is made.
	END

demo: setup-demo
	@.venv/bin/umem demo $(ARGS)
	[ "$${VIRTUAL_ENV-}" = "$$PWD/.venv" ] ||
		echo 'umem: before these, and before python with umem: . .venv/bin/activate'

# A worker a core, each with one thread for NumPy: more threads would wait for one another.
PYTEST := env OMP_NUM_THREADS=$${OMP_NUM_THREADS-1} OPENBLAS_NUM_THREADS=$${OPENBLAS_NUM_THREADS-1} \
	.venv/bin/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal

test: setup-test
	@$(PYTEST) -m "not slow and not gpu and not thorough" $(ARGS)

test-all: setup-test
	@$(PYTEST) -m "not slow and not gpu" $(ARGS)

check: setup-test
	@failed=0
	.venv/bin/python -m ruff check . || failed=1
	.venv/bin/python -m ruff format --check . || failed=1
	.venv/bin/python -m mypy --strict umem || failed=1
	exit $$failed

clean:
	@[ ! -e .venv/made-by-make ] || { $(EMPTY) && rm -rf .venv; }
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.*' -prune -exec rm -rf {} +

setup-demo: extras := chainer,plot
setup-test: extras := chainer,plot,test,dev

# .venv is complete when the file .venv/setup-demo or .venv/setup-test holds a checksum of what
# was asked for. The file is written last and removed first: what was interrupted starts again.
setup-demo setup-test:
	@wanted=$$({ pwd; cat setup.py build-constraints.txt; } | cksum)
	complete() {
		[ "$$(cat .venv/$$1 2>/dev/null)" = "$$wanted" ] && .venv/bin/python -c '' 2>/dev/null
	}
	say() { printf 'umem: %s\n' "$$*"; }
	log=.venv/setup.log
	quietly() { "$$@" >>$$log 2>&1; }
	must() {
		quietly "$$@" && return
		tail -n 30 $$log >&2
		say "that failed; the end of $$log is above" >&2
		exit 1
	}
	if complete $@; then exit; fi
	# Some programs turn Ctrl-C into an ordinary failure, which bash would let pass.
	trap 'exit 130' INT TERM HUP

	# One set-up at a time. The lock goes with the last process that has the file open.
	if command -v flock >/dev/null; then
		exec 9<Makefile
		flock -n 9 || { say 'waiting for another make to set up .venv'; flock 9 || :; }
		if complete $@; then exit; fi
	fi

	whole() { [ -e .venv/setup-demo ] && .venv/bin/python -c '' 2>/dev/null; }
	if [ -e .venv/made-by-make ] && ! whole; then
		say 'starting again: an earlier set-up of .venv was not finished, or its Python is gone'
		$(EMPTY)
	fi
	if [ ! -x .venv/bin/python ]; then
		why='none was found'
		chosen=
		if [ -z "$${PYTHON-}" ]; then
			set -- python3 python3.13 python3.12 python3.11 python3.10
		else
			set -- "$$PYTHON"
		fi
		for python in "$$@"; do
			version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
			if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
				why="$$python is Python $$version"
			elif ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then
				why="$$python ($$version) cannot make environments (Debian, Ubuntu: apt install python3-venv)"
			else
				chosen=$$python
				break
			fi
		done
		if [ -z "$$chosen" ]; then
			say "needs Python 3.10 or newer; $$why. Name one: make PYTHON=/path/to/python3" >&2
			exit 1
		fi
		say "making .venv with Python $$version"
		mkdir -p .venv
		: >.venv/made-by-make
		must "$$chosen" -m venv .venv
	fi
	: >$$log
	export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0
	pip='.venv/bin/python -m pip'
	quietly $$pip --version || must .venv/bin/python -m ensurepip
	must $$pip install 'pip>=21.3'  # the first that installs in place without setup.py develop

	# Built without isolation, so that pip's version does not matter: which of its options
	# reach the setuptools of an isolated build has changed twice.
	if ! complete setup-demo; then
		say 'building Chainer, with a setuptools that it can be built with'
		chainer=$$(sed -n 's/.*"\(chainer>=[^"]*\)".*/\1/p' setup.py)
		rm -rf .venv/build-tools .venv/wheels
		must $$pip install --target .venv/build-tools -r build-constraints.txt wheel
		must env PYTHONPATH="$$PWD/.venv/build-tools" \
			$$pip wheel --no-build-isolation --no-deps --wheel-dir .venv/wheels "$$chainer"
	fi

	rm -f .venv/setup-demo .venv/setup-test
	say 'installing umem[$(extras)]'
	must $$pip install --find-links .venv/wheels -e '.[$(extras)]'
	if [ $@ = setup-test ]; then
		say 'installing CuPy (140 MiB), which tests compare with; no GPU is needed'
		quietly $$pip install --only-binary :all: $(CUPY) ||
			say "CuPy does not install here (see $$log): its tests are skipped"
		printf '%s\n' "$$wanted" >.venv/setup-test
	fi
	printf '%s\n' "$$wanted" >.venv/setup-demo
	say '.venv is ready'
