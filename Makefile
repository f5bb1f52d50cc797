# Every target makes and uses its own .venv. Those that need the two-node lab want root and a Debian or Ubuntu machine.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help check test test-all test-vllm rehearse bench wheels clean lab-ready

python := .venv/bin/python
installed := .venv/.installed
# What the lab runs, and the package that has it.
lab_commands := dockerd=docker.io sshd=openssh-server ssh=openssh-client rsync=rsync ip=iproute2 iptables=iptables \
  ping=iputils-ping debootstrap=debootstrap docker-registry=docker-registry sudo=sudo git=git sysctl=procps \
  nsenter=util-linux openssl=openssl curl=curl /usr/bin/python3=python3

again = $(if $(ENGINE), ENGINE=$(ENGINE))$(if $(ONLY), ONLY='$(ONLY)')

# A run that ends hard (a test that hangs, a second Ctrl-C) cannot take its lab down itself.
guard = $(python) -m tests.lab guard --

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s  %s\n", $$1, $$2 }' Makefile

check: $(installed) ## Format, lint, types, and that generated documents agree with the code
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m mypy sparkserve tests docs/generate.py
	$(python) docs/generate.py --check

test: lab-ready $(installed) ## Everything except the faults: unit, component, one pass of the line on the lab
	$(guard) $(python) -m pytest -m "not faults and not vllm"

test-all: lab-ready $(installed) ## All that `make test` runs, and every fault on the lab, in one run
	$(guard) $(python) -m pytest -m "not vllm"

test-vllm: lab-ready $(installed) ## Real vLLM over the two nodes of the lab, on their processors, in at most 12 minutes; prints its figures
	$(guard) timeout --foreground --signal INT 720 $(python) -m pytest -m vllm --durations=0 --durations-min=5 -rP

rehearse: lab-ready $(installed) ## The whole line, up to verify and stop, on the lab; ENGINE=vllm takes real vLLM
	$(guard) $(python) -m tests.lab.rehearse $(ENGINE)

# The figures of the command line alone need no lab; beside all others the soak lasts a minute, by itself 15.
bench_lab := $(if $(filter-out cli,$(or $(ONLY),all)),lab-ready)
bench: $(installed) $(bench_lab) ## Figures and their limits; ONLY="cli" takes some
	$(if $(ONLY),,SOAK_SECONDS=$${SOAK_SECONDS:-60}) $(if $(bench_lab),$(guard)) $(python) -m tests.bench $(ONLY)

wheels: $(installed) ## Ask the package index whether a Spark gets a wheel of every pinned dependency
	@.ci/aarch64_wheels.sh

clean: ## Take the lab down; remove .venv, .lab, .bench and caches
	@.ci/clean.sh

# Whoever is not root hears of the packages, too, before being sent to sudo.
lab-ready:
	@.ci/debian_packages.sh $(lab_commands) || code=$$?; ((EUID == 0)) || { code=1; \
	  echo "the lab makes network namespaces and needs root: sudo make $(MAKECMDGOALS)$(again)" >&2; }; exit $${code:-0}
	@compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null || apt-get update --quiet=2

$(installed): pyproject.toml .ci/requirements.lock .ci/make_venv.sh
	.ci/make_venv.sh
	@touch $@
