# Commands for developers. Everything is Go; only the race detector needs a C compiler.

GO          ?= go
FUZZTIME    ?= 10m
STATICCHECK ?= honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOTESTSUM   ?= gotest.tools/gotestsum@v1.13.0

# Prints the output of go test, followed by every skipped test with its reason. Test programs are short-lived, so collecting garbage
# less often saves a fifth of their processor time.
TEST = GOGC=400 GOMEMLIMIT=3GiB $(GO) run $(GOTESTSUM) --format standard-quiet --

.PHONY: all build run test race long fleet fleet-pins fleet-better long-steps mfu meaning torch mutants meaning-mutants reduce-planted bench kernels kernels-changed gpu-bundle gpu-check gpu-planted gpu-drill engines release release-check lint fuzz cover docs paper external replicas records clean

all: build test

build: ## both commands, into bin/
	@mkdir -p bin
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/ ./cmd/sppoc ./cmd/sppovm

run: build ## compile the example, train it, and generate text
	@mkdir -p out
	bin/sppoc build examples/gpt-docs.sppo -o out/gpt-docs.sppb
	rm -rf out/gpt-docs.ckpt
	bin/sppovm run out/gpt-docs.sppb --save out/gpt-docs.ckpt
	bin/sppovm sample --resume out/gpt-docs.ckpt --prompt "The schedule of a stage is " --max-tokens 220 --temperature 0.6

test: ## all tests, slow ones in their short form
	$(TEST) -timeout 30m ./...

# Large computations in one goroutine gain nothing from the race detector, which makes them several times slower. So the naive models
# are left out, and the tests of codegen and sim that do not run stages or ranks beside each other.
SEQUENTIAL = ^Test(Footprint|PartsAddUp|PlaceLives|EditedPlans|ExtentsAreNearTheBound|SharedFits|AgreesWithPrediction|SizesBeyond32Bits|CriticalPath|FoldedEquals|Memory$$)

race: ## the concurrent packages under the race detector; needs gcc
	$(TEST) -race -vet=off -timeout 20m -short -skip '$(SEQUENTIAL)' ./internal/vm ./internal/vm/cpu/... ./internal/vm/field ./internal/vm/sim ./internal/train/... ./internal/codegen ./internal/cuda
	$(TEST) -race -vet=off -timeout 20m -run '^Test(SchedulesAreEqual|Resume)' ./internal/e2e

long: ## tests that take hours: every combination of settings; every key of every job of the paper pinned
	SPPO_LONG=1 $(TEST) -timeout 600m ./...

meaning: ## prove what the programs of 500 random specs on three seeds compute, and those of all examples; 30 minutes
	for seed in $${SPPO_SEED:-1 2 3}; do SPPO_LONG=1 SPPO_SEED=$$seed $(GO) test ./internal/e2e -run '^TestMeaningOfRandomSpecs$$' -count 1 -timeout 120m || exit 1; done
	SPPO_LONG=1 $(GO) test ./internal/e2e -run '^TestMeaningOfExamples$$' -count 1 -timeout 120m

torch: ## run every opcode on a thousand random operands, examples and random specs, on the cpu and with PyTorch; SPPO_PYTHON names a Python with torch
	SPPO_LONG=1 $(GO) test -count 1 -timeout 120m -v ./interop/torch
	SPPO_LONG=1 $(GO) test -count 1 -timeout 120m -v -run '^TestTorch' ./internal/e2e

mutants: ## break programs of all kinds in more than 10,000 ways: how many the verifier accepts, and how many of these change results
	SPPO_LONG=1 SPPO_SEED=$${SPPO_SEED:-1} $(GO) test ./internal/e2e -run '^TestMutants$$' -v -count 1 -timeout 120m

meaning-mutants: ## break programs in more than 12,000 ways, and ask verify --meaning: a table by kind of change; a second run goes on where the first stopped
	@mkdir -p out
	SPPO_LONG=1 SPPO_SEED=$${SPPO_SEED:-1} SPPO_MUTANTS="$${SPPO_MUTANTS:-$(CURDIR)/out/mutants-$$(git describe --always).jsonl}" $(GO) test ./internal/e2e -run '^TestMeaningOfMutants$$' -v -count 1 -timeout 120m

reduce-planted: ## plant bugs in compiled programs, and shrink a spec for each: attempts, lines and layers
	SPPO_LONG=1 $(GO) test -count 1 -timeout 60m -v -run '^TestReducePlanted$$' ./cmd/sppoc

fleet: ## plan common jobs on common machines, and check each report against its program
	SPPO_LONG=1 $(GO) test ./cmd/sppoc -run '^TestFleet(Questions)?$$' -v -timeout 120m

fleet-pins: ## compare the plans of the fleet with plans in which one value is pinned; several hours; a second run goes on where the first stopped
	@mkdir -p out
	SPPO_LONG=1 SPPO_PINS="$${SPPO_PINS:-$(CURDIR)/out/fleet-pins-$$(git describe --always).jsonl}" $(GO) test ./cmd/sppoc -run TestFleetPins -v -timeout 180m

fleet-better: ## plan jobs of the fleet on their machine and on one that is better in one respect: no step may become slower
	SPPO_LONG=1 $(GO) test ./cmd/sppoc -run TestFleetBetter -v -timeout 120m

long-steps: ## plan, build, verify and simulate jobs with many sequences or many GPUs: processor time and memory
	SPPO_LONG=1 $(GO) test ./cmd/sppoc -run TestLongSteps -v -timeout 60m

mfu: ## plan common models on 1, 3, 5 and 7 GPUs: simulated MFU over all GPUs, with reasons for low ones
	SPPO_LONG=1 $(GO) test ./cmd/sppoc -run TestMFU -v -timeout 300m

bench: ## benchmarks, as ratios within one run
	$(GO) test -run '^$$' -bench . -benchtime 1x -timeout 60m ./...

kernels: ## compile every kernel for each kind of GPU and rewrite the record of registers, spills and speeds, which takes minutes; NVRTC comes from the package index, once
	@bash internal/cuda/nvrtc/get.sh out/nvrtc
	@SPPO_LONG=1 SPPO_CUDA_PATH="$(CURDIR)/out/nvrtc/nvidia:$$SPPO_CUDA_PATH" $(GO) test -count 1 -timeout 60m -v -run '^TestCompile$$' ./internal/cuda/kernels -update

kernels-changed: ## compile only kernels that are not in the record, and one to compare; check the figures of all
	@bash internal/cuda/nvrtc/get.sh out/nvrtc
	@SPPO_CUDA_PATH="$(CURDIR)/out/nvrtc/nvidia:$$SPPO_CUDA_PATH" $(GO) test -count 1 -timeout 60m -v -run '^TestCompile$$' ./internal/cuda/kernels

# Architectures of precompiled kernels. Other GPUs, and drivers too old for these kernels, compile them when they run.
GPUS  = 80 90 90a 100
SMALL = -trimpath -ldflags='-s -w'

# Maximum size of the bundle in bytes: links and services to machines with a GPU often refuse large files.
BUNDLE = 40000000

gpu-bundle: ## files for gpu-check on a machine without Go, in out/gpu.tar.gz: binaries, compiled kernels, losses of the cpu
	rm -rf out/gpu out/gpu.tar.gz && mkdir -p out/gpu
	CGO_ENABLED=0 $(GO) test -c $(SMALL) -o out/gpu/cuda.test ./internal/cuda
	CGO_ENABLED=0 $(GO) test -c $(SMALL) -o out/gpu/e2e.test ./internal/e2e
	CGO_ENABLED=0 $(GO) build $(SMALL) -o out/gpu/ ./cmd/sppovm ./bench/gpu
	@bash internal/cuda/nvrtc/get.sh out/nvrtc
	SPPO_CUDA_PATH="$(CURDIR)/out/nvrtc/nvidia:$$SPPO_CUDA_PATH" out/gpu/gpu kernels out/gpu/kernels $(GPUS) || echo "SKIPPED: no kernels were compiled"
	cat README.md ARCHITECTURE.md docs/*.md >out/gpu/text.txt
	out/gpu/gpu references out/gpu examples
	cp bench/gpu/check.sh bench/gpu/*.sppo bench/peers/torch_layers.py out/gpu/
	cp -rL interop/torch/sppo_torch out/gpu/
	tar -C out -czf out/gpu.tar.gz gpu
	@bytes=$$(wc -c <out/gpu.tar.gz); echo "out/gpu.tar.gz: $$((bytes / 1000000)) MB"; test $$bytes -le $(BUNDLE) || { echo "the limit is $(BUNDLE) bytes" >&2; exit 1; }

gpu-check: gpu-bundle ## on a machine with a GPU: compare it with the cpu, then measure its speed, into bench/gpu
	rm -rf out/gpu-results; OUT=out/gpu-results bash out/gpu/check.sh; status=$$?; cp out/gpu-results/20*.json bench/gpu/; exit $$status

# PLANTED prints the rows that tests log, or everything if a test fails.
PLANTED = awk '{ all = all $$0 "\n" } sub(/.*PLANTED/, "") { rows = rows $$0 "\n" } /^(FAIL|--- FAIL)/ { bad = 1 } END { if (bad || !rows) { printf "%s", all; exit 1 } printf "| stage | planted error | report |\n| --- | --- | --- |\n%s", rows }'

gpu-planted: ## plant errors in kernels, driver and cpu device, and print how the checks of gpu-check report each
	SPPO_LONG=1 $(GO) test -count 1 -timeout 60m -v -run '^TestPlanted' ./internal/cuda ./bench/gpu ./internal/e2e 2>&1 | $(PLANTED)

gpu-drill: ## the first hour of docs/gpu.md on a stand-in for a machine that is lent
	SPPO_LONG=1 $(GO) test -count 1 -timeout 60m -v -run '^TestDrill' ./bench/gpu

engines: ## start jobs by torchrun, Open MPI, Slurm and a stand-in for Kubernetes; installs what is missing
	bash bench/engines/check.sh out/engines

release: ## archives for every platform with checksums, into out/release; equal sources give equal bytes
	$(GO) run ./tools/release

release-check: ## build the release twice and compare bytes; go install it from a file proxy
	SPPO_LONG=1 $(GO) test -count 1 -v -timeout 30m ./tools/release

lint: ## formatting, vet, staticcheck
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "not formatted:" $$unformatted; exit 1; fi
	$(GO) vet ./...
	@if command -v staticcheck >/dev/null; then staticcheck ./...; \
	elif [ -x "$$($(GO) env GOPATH)/bin/staticcheck" ]; then "$$($(GO) env GOPATH)/bin/staticcheck" ./...; \
	else $(GO) run $(STATICCHECK) ./...; fi

paper: ## the paper's evaluation, simulated again: docs/paper.md, its tables and figures
	$(GO) run ./tools/paper

external: ## compare steps that others have measured with simulated ones: the tables in docs/predictions.md
	$(GO) run ./bench/external

replicas: ## simulate steps with 8 to 64 replicas that do the same work as one: the table in docs/predictions.md
	$(GO) run ./bench/external -replicas

records: ## compare published results with predictions for the same jobs: docs/records.md
	$(GO) run ./tools/records

fuzz: ## every fuzz target for FUZZTIME
	@for p in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz'); do \
	    echo "$$p $$f for $(FUZZTIME)"; \
	    $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 20x $$p || exit 1; \
	  done; \
	done

cover: ## coverage of all packages by all tests
	@mkdir -p out
	$(GO) test -coverpkg ./... -coverprofile out/cover.out ./...
	$(GO) tool cover -func out/cover.out | tail -1

docs: ## rewrite the reference pages and golden files
	$(GO) test $$(grep -rlE 'irtest"|"update"' --include='*_test.go' . | xargs -n 1 dirname | sort -u) -update

clean:
	rm -rf bin out
