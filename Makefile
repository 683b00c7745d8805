# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes .venv first when it is missing.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export RAY_USAGE_STATS_ENABLED = 0
export MLFLOW_DISABLE_TELEMETRY = true
export HF_HUB_OFFLINE = 1

.PHONY: demo test lint up down ui testbed bench bench-estimate bench-simulate bench-schedule bench-explore bench-games help

help:            ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 20

$(VENV)/.installed: packages/common/pyproject.toml packages/scale_across/pyproject.toml packages/strat_reasoner/pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --progress-bar off -e packages/common -e packages/scale_across -e packages/strat_reasoner -r requirements-dev.txt
	@touch $@

.venv: $(VENV)/.installed  ## the virtual environment with all three packages and the development tools

demo: $(VENV)/.installed  ## the main job on simulated sites, start to end; ARGS="--set train.seed=3" changes it
	@$(BIN)/python experiments/session.py demo $(ARGS)

up: $(VENV)/.installed    ## simulated sites and MLflow, left running for `ray job submit`
	@$(BIN)/python experiments/session.py up $(ARGS)

down: $(VENV)/.installed  ## stop what `make up` started
	@$(BIN)/python experiments/session.py down

ui: $(VENV)/.installed    ## MLflow's page over all recorded runs
	@$(BIN)/python experiments/session.py ui $(ARGS)

testbed: $(VENV)/.installed  ## pipeline training over shaped links (root) against its prediction; 8 minutes
	@$(BIN)/python experiments/schedule_testbed.py --config experiments/configs/testbed.yaml \
		--output experiments/results/testbed.csv --figure docs/figures/testbed.svg $(ARGS)

lint: $(VENV)/.installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy packages/common/src packages/scale_across/src packages/strat_reasoner/src experiments

test: $(VENV)/.installed  ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

bench-estimate: $(VENV)/.installed  ## candidate estimates per CPU-second, and one estimate's time
	@$(BIN)/python experiments/bench/bench_estimate.py

bench-simulate: $(VENV)/.installed  ## event simulation: blocks per CPU-second, a step of 131,072 GPUs
	@$(BIN)/python experiments/bench/bench_simulate.py

bench-schedule: $(VENV)/.installed  ## generating pipeline schedules, and running them
	@$(BIN)/python experiments/bench/bench_schedule.py

bench-games: $(VENV)/.installed     ## games per second, exact evaluations
	@$(BIN)/python experiments/bench/bench_games.py

bench-explore: $(VENV)/.installed   ## the joint search, up to 131,072 GPUs over five sites
	@$(BIN)/python experiments/bench/bench_explore.py

bench: bench-estimate bench-simulate bench-schedule bench-explore bench-games  ## all of them
