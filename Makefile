# bs: `make run` sweeps batch sizes on what this machine has, `make test` checks everything that needs no GPU.
# Needs a C compiler and stb_image_write (Debian/Ubuntu: apt-get install gcc make libstb-dev). With the CUDA toolkit the
# program gets its GPU half; ARCH=sm_86 or ARCH=all chooses for whom (default: the GPU that is here, else a wide range).

CC ?= cc
NVCC ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
STB ?= $(firstword $(patsubst %/stb_image_write.h,%,$(wildcard /usr/include/stb/stb_image_write.h \
         /usr/include/stb_image_write.h /usr/local/include/stb_image_write.h .carry/stb/stb_image_write.h)))

# OpenMP is used where a program that needs it links; one thread otherwise.
OPENMP := $(shell echo 'int omp_get_max_threads(void); int main(void) { return !omp_get_max_threads(); }' | \
            $(CC) -x c -fopenmp -o /dev/null - 2>/dev/null && echo -fopenmp)
NATIVE := $(shell echo 'int main(void) { return 0; }' | $(CC) -x c -march=native -o /dev/null - 2>/dev/null && echo -march=native)

WARN = -Wall -Wextra -Werror
C = $(CC) -x c -std=c11 -D_POSIX_C_SOURCE=200809L -ffp-contract=fast $(NATIVE) $(OPENMP) $(WARN) -isystem $(STB)
SANITIZE = -fsanitize=address,undefined -fno-sanitize-recover=all -g

GENCODE_all = $(foreach a,75 80 86 89 90a 100 120,-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_120,code=compute_120
# Hopper's wgmma needs code for sm_90a, which -arch=native does not make.
CAPABILITY = $(firstword $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null))
GENCODE_sm_90a = -gencode arch=compute_90a,code=sm_90a
GENCODE_here = $(if $(CAPABILITY),$(if $(filter 9.0,$(CAPABILITY)),$(GENCODE_sm_90a),-arch=native),$(GENCODE_all))
GENCODE = $(if $(ARCH),$(or $(GENCODE_$(ARCH)),-arch=$(ARCH)),$(GENCODE_here))
HOST = -ffp-contract=fast $(NATIVE) $(OPENMP) $(WARN)
NV = $(NVCC) -O3 -std=c++17 --threads 0 $(GENCODE) $(addprefix -Xcompiler=,$(HOST)) -isystem $(STB)

PROGRAM = $(if $(NVCC),bs,bs-cpu)
SOURCES = bs.cu model.h $(wildcard parts/*.h)
TESTS = test_model test_report test_loader test_variants test_tokenizer test_sched test_plots test_advice

all: $(PROGRAM)

run: $(PROGRAM)
	./$(PROGRAM)

bs: $(SOURCES) | need-stb
	$(NV) -o $@ bs.cu $(if $(OPENMP),-lgomp)

bs-cpu: $(SOURCES) | need-stb
	$(C) -O3 -o $@ bs.cu -lm

need-stb:
	@test -n "$(STB)" || { echo "stb_image_write.h is missing: apt-get install libstb-dev, or make STB=directory"; exit 1; }

# Every test runs against the optimised code and once more under the address and undefined-behaviour sanitizers.
build/%: tests/%.c $(wildcard tests/*.h) $(SOURCES) | need-stb
	@mkdir -p build
	$(C) -O3 -o $@ $< -lm

build/%-san: tests/%.c $(wildcard tests/*.h) $(SOURCES) | need-stb
	@mkdir -p build
	$(C) -O1 $(SANITIZE) -o $@ $< -lm

build/bs-san: $(SOURCES) | need-stb
	@mkdir -p build
	$(C) -O2 $(SANITIZE) -o $@ bs.cu -lm

test: $(PROGRAM) bs-cpu build/bs-san $(TESTS:%=build/%) $(TESTS:%=build/%-san)
	tests/run.sh $(TESTS)

build/test_gpu: tests/test_gpu.cu $(wildcard tests/*.h) $(SOURCES) | need-stb
	@mkdir -p build
	$(NV) -o $@ $< $(if $(OPENMP),-lgomp)

gpu-test: build/test_gpu
	build/test_gpu

# A real model's logits, text and sweep; needs what tests/smollm2.py writes.
real-test: bs-cpu build/test_real
	build/test_real

clean:
	rm -rf build bs bs-cpu

help:
	@echo "make            build bs (with nvcc) or bs-cpu (without)"
	@echo "make run        build and sweep batch sizes; results in plots/"
	@echo "make test       all tests that need no GPU"
	@echo "make gpu-test   the GPU against the CPU; needs the card for itself"
	@echo "make real-test  SmolLM2-135M against transformers (tests/smollm2.py fetches it)"
	@echo "make clean      remove what was built"
	@echo "variables: ARCH=sm_86|all, CC=..., NVCC=..., STB=directory of stb_image_write.h"

.PHONY: all run test gpu-test real-test clean help need-stb
