# moeforge. `make tune` and `make test` do everything on a bare Debian or Ubuntu machine; see README.md.
#   make                 the tool: build/moeforge, and the runtime library: build/libmoeforge.{a,so}
#   make tune            tunes SPEC (a small one without a GPU) and shows the winners
#   make test            builds, analyses and tests everything that needs no GPU
#   make check           the test suites only        SANITIZE=1: with ASan and UBSan, in build-asan/
#   make check-threads   the runtime library under ThreadSanitizer
#   make fuzz-package    hostile packages and recipes with libFuzzer, FUZZ_SECONDS=60 each; needs clang
#   make wheel           the Python package with libmoeforge.so in it: build/wheel/*.whl; make check-python tests it
#   make lint            cppcheck and clang-tidy; files that have not changed since are not looked at again
#   make install         PREFIX=/usr/local, DESTDIR= : tool, library, header, moeforge.pc
#   STATIC=1             links libyaml, SQLite, jansson and libcrypto statically, so that build/moeforge runs elsewhere

BUILD    ?= $(if $(SANITIZE),build-asan,build)
CC       ?= cc
-include .local/toolkit.mk
CUDA_HOME ?= $(firstword $(wildcard /usr/local/cuda) $(patsubst %/bin/nvcc,%,$(shell command -v nvcc 2>/dev/null)))
CUDA_INCLUDE ?= $(CUDA_HOME)/include
export CUDA_INCLUDE
# The jobs at a time of tune, test, check and lint, unless make was told with -j.
JOBS     ?= $(shell nproc)
PARALLEL  = $(if $(findstring -j,$(MAKEFLAGS)),,-j$(JOBS)) --no-print-directory --silent

WARN     := -Wall -Wextra -Werror -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wvla
OPT      := $(if $(SANITIZE),-O1 -g -fsanitize=address,-O2 -g)$(if $(SANITIZE), -fsanitize=undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
CPPFLAGS += -D_GNU_SOURCE -Iinclude -iquote runtime -iquote tuner -iquote templates -iquote emu -isystem $(CUDA_INCLUDE)
CFLAGS   += -std=c11 $(OPT) $(WARN) -ffp-contract=off -fvisibility=hidden -fPIC
LDFLAGS  += $(if $(SANITIZE),-fsanitize=address -fsanitize=undefined)
ifdef STATIC
LIBS     := -Wl,-Bstatic -lyaml -lsqlite3 -ljansson -lcrypto -Wl,-Bdynamic -lpthread -ldl -lm
else
LIBS     := -lyaml -lsqlite3 -ljansson -lcrypto -lpthread -ldl -lm
endif
# reference.c uses OpenMP; the tool runs without it, only slower.
OPENMP   ?= -fopenmp
OPENMP_LINK ?= $(if $(STATIC),-Wl$(comma)-Bstatic -lgomp -Wl$(comma)-Bdynamic,$(OPENMP))
comma    := ,

RUNTIME_SRC := $(wildcard runtime/*.c)
EMU_SRC     := $(wildcard emu/*.c)
TUNER_SRC   := $(filter-out tuner/main.c,$(wildcard tuner/*.c))
TEST_SRC    := $(wildcard tests/test_*.c)
RUNTIME_OBJ := $(RUNTIME_SRC:%.c=$(BUILD)/%.o)
EMU_OBJ     := $(EMU_SRC:%.c=$(BUILD)/%.o)
TUNER_OBJ   := $(TUNER_SRC:%.c=$(BUILD)/%.o)
# The suites that take longest, by falling time. The first ones execute kernels on the emulated device, or have the tool compile them, for minutes. They are not run a second
# time with sanitizers: what they run of our own code is in other suites, too.
KERNEL_TESTS := test_emu_shapes test_emu_batch_mutants test_emu_matrix test_emu_mutants test_emu_routing test_emu_batch test_family_stream test_emu_given test_family_batch test_tune test_tune_batch test_behind test_cli_gpu test_floor
LONG_TESTS   := test_trace test_fuzz test_tune_emu test_cli
TESTS       := $(filter-out $(if $(SANITIZE),$(KERNEL_TESTS:%=$(BUILD)/tests/%)),$(TEST_SRC:tests/%.c=$(BUILD)/tests/%))
# Kernels that are compiled for the emulated device call back into the program: the whole emulator is linked, and what exports.txt lists is exported.
EMU_LINK    := -Wl,--whole-archive $(BUILD)/libemu.a -Wl,--no-whole-archive -Wl,--dynamic-list=emu/exports.txt
EMU_DEPS    := $(BUILD)/libemu.a emu/exports.txt

# Object files of tests are kept.
.SECONDARY:
.PHONY: all tune test everything check check-sanitized check-threads check-python wheel forward-cost fuzz-package lint clean install bootstrap
all: $(BUILD)/moeforge $(BUILD)/libmoeforge.so $(BUILD)/bench/forward_cost

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	@echo "  CC $<"
	@$(CC) $(CPPFLAGS) $(CFLAGS) $(if $(filter tuner/reference.c,$<),$(OPENMP)) $(if $(filter emu/%,$<),-fvisibility=default) -MMD -MP -c $< -o $@
$(BUILD)/libmoeforge.a: $(RUNTIME_OBJ)
	@rm -f $@
	@echo "  AR $@"
	@ar rcs $@ $^
$(BUILD)/libmoeforge.so: $(RUNTIME_OBJ)
	@echo "  LD $@"
	@$(CC) $(LDFLAGS) -shared -Wl,-soname,libmoeforge.so.1 -o $@ $^ -ldl -lpthread
$(BUILD)/libemu.a: $(EMU_OBJ)
	@rm -f $@
	@echo "  AR $@"
	@ar rcs $@ $^
$(BUILD)/libtuner.a: $(TUNER_OBJ)
	@rm -f $@
	@echo "  AR $@"
	@ar rcs $@ $^
$(BUILD)/moeforge: $(BUILD)/tuner/main.o $(BUILD)/libtuner.a $(BUILD)/libmoeforge.a $(EMU_DEPS)
	@echo "  LD $@"
	@$(CC) $(LDFLAGS) -o $@ $(filter-out $(EMU_DEPS),$^) $(EMU_LINK) $(OPENMP_LINK) $(LIBS)
$(BUILD)/tests/%: $(BUILD)/tests/%.o $(BUILD)/libtuner.a $(BUILD)/libmoeforge.a $(EMU_DEPS)
	@echo "  LD $@"
	@$(CC) $(LDFLAGS) -o $@ $(filter-out $(EMU_DEPS),$^) $(EMU_LINK) $(OPENMP_LINK) $(LIBS) -lcheck -lsubunit -lrt -lm
# What a forward call costs the host: `make forward-cost` measures it on the scripted driver, whose launches do nothing; on a GPU run it with a package of yours.
$(BUILD)/bench/%: $(BUILD)/bench/%.o $(BUILD)/libmoeforge.a
	@echo "  LD $@"
	@$(CC) $(LDFLAGS) -o $@ $^ -ldl -lpthread -lm
forward-cost: $(BUILD)/bench/forward_cost $(BUILD)/tests/make_package $(BUILD)/tests/libfakecuda.so
	@$(BUILD)/tests/make_package $(BUILD)/bench/fixture.moeforge
	@MOEFORGE_LIBCUDA=$(BUILD)/tests/libfakecuda.so FAKECUDA=light $(BUILD)/bench/forward_cost $(BUILD)/bench/fixture.moeforge
# Scripted stand-in for the CUDA driver.
$(BUILD)/tests/libfakecuda.so: tests/fake_libcuda.c $(wildcard tests/fake_libcuda*.h) runtime/cuda_api.h
	@mkdir -p $(@D)
	@echo "  CC $@"
	@$(CC) $(CPPFLAGS) -std=c11 -g -fPIC -shared $(WARN) -o $@ $<
# The same with kernels that work, so that the whole tool can be run on it.
$(BUILD)/tests/libfakegpu.so: tests/fake_gpu.c tests/fake_libcuda.c $(wildcard tests/fake_libcuda*.h) $(BUILD)/libtuner.a $(BUILD)/libmoeforge.a
	@mkdir -p $(@D)
	@echo "  CC $@"
	@$(CC) $(CPPFLAGS) -std=c11 -O2 -g -fPIC -shared $(WARN) $(OPENMP) -o $@ tests/fake_gpu.c tests/fake_libcuda.c $(BUILD)/libtuner.a $(BUILD)/libmoeforge.a -lm -lpthread

# The runtime library with ThreadSanitizer, and eight threads that use it on the scripted driver.
TSAN     := $(BUILD)/tsan
TSAN_RUN := setarch $(shell uname -m) -R
$(TSAN)/%.o: %.c
	@mkdir -p $(@D)
	@echo "  CC $< (threads)"
	@$(CC) $(CPPFLAGS) -std=c11 -O1 -g -fsanitize=thread $(WARN) -MMD -MP -c $< -o $@
$(TSAN)/threads: $(TSAN)/tests/threads.o $(RUNTIME_SRC:%.c=$(TSAN)/%.o)
	@echo "  LD $@"
	@$(CC) -fsanitize=thread -o $@ $^ -ldl -lpthread -lm
# Without randomised addresses, where that can be had: the sanitizer's runtime does not know the mappings of every kernel. Where it does not start at all
# (a container that forbids it, on a kernel with many random bits), there is nothing to run, and that is said.
check-threads: $(TSAN)/threads $(BUILD)/tests/make_package $(BUILD)/tests/libfakecuda.so
	@$(BUILD)/tests/make_package $(TSAN)/threads.moeforge
	@run=; $(TSAN_RUN) true 2>/dev/null && run='$(TSAN_RUN)'; log=$(TSAN)/threads.log; \
	  if FAKECUDA_LIBRARY=$(abspath $(BUILD))/tests/libfakecuda.so TSAN_OPTIONS=exitcode=66 $$run $(TSAN)/threads $(TSAN)/threads.moeforge >$$log 2>&1; then cat $$log; \
	  elif grep -q 'unexpected memory mapping' $$log; then echo "threads: not run, ThreadSanitizer does not start on this kernel"; \
	  else cat $$log; exit 1; fi

# Hostile packages and recipes, for FUZZ_SECONDS each, with clang's libFuzzer and sanitizers (Debian: clang, libclang-rt-14-dev). What it keeps lies in
# $(BUILD)/fuzz/*.corpus; an input that fails is written to $(BUILD)/fuzz/. The suites try a fixed part of this without clang (tests/test_package_fuzz.c).
FUZZ_SECONDS ?= 60
FUZZ_CFLAGS := -Wno-c2x-extensions -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
$(BUILD)/fuzz/%: tests/fuzz/%.c tests/fuzz/driver_stub.h $(RUNTIME_SRC) $(wildcard runtime/*.h include/*.h)
	@mkdir -p $(@D)
	@command -v clang >/dev/null || { echo "fuzzing needs clang with libFuzzer (Debian and Ubuntu: clang, libclang-rt-dev)" >&2; exit 1; }
	@echo "  LD $@"
	@clang $(CPPFLAGS) $(FUZZ_CFLAGS) -o $@ $< $(filter-out runtime/cuda_api.c,$(RUNTIME_SRC)) -lm
fuzz-package: $(BUILD)/fuzz/package_fuzz $(BUILD)/fuzz/recipe_fuzz $(BUILD)/tests/make_package
	@mkdir -p $(BUILD)/fuzz/package.corpus $(BUILD)/fuzz/recipe.corpus
	@$(BUILD)/tests/make_package $(BUILD)/fuzz/package.corpus/seed $(BUILD)/fuzz/package.corpus/seed-elf $(BUILD)/fuzz/recipe.corpus/seed
	cd $(BUILD)/fuzz && ./package_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=16384 -print_final_stats=1 package.corpus
	cd $(BUILD)/fuzz && ./recipe_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=2048 -print_final_stats=1 recipe.corpus

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

bootstrap:
	@scripts/bootstrap.sh build

# The main job. SPEC: what to tune; without it Qwen3.5-35B where there is a GPU, a small shape on the emulated device where there is none.
ifeq ($(wildcard /dev/nvidia0)$(SPEC),)
TUNE := specs/models/tiny.yaml --device emu
else
TUNE := $(or $(SPEC),specs/models/qwen3.5-35b-a3b.yaml)
endif
tune:
	@scripts/bootstrap.sh build
	@$(MAKE) $(PARALLEL) $(BUILD)/moeforge
	$(BUILD)/moeforge tune $(TUNE)

# Both builds, both runs of the suites and the analysis share the cores: what waits leaves its core to another.
test:
	@scripts/bootstrap.sh test
	@$(MAKE) $(PARALLEL) --keep-going everything
	@echo "all tests passed"
everything: all check check-sanitized check-threads lint
check-sanitized:
	@$(MAKE) SANITIZE=1 BUILD=$(BUILD)-asan check

# A suite prints its result, all that it said if it failed, and its seconds. The longest ones start first. Each has GPU locks of its own: its scripted GPU is
# no other suite's, and would be waited for.
RUN_ALL := $(TESTS:$(BUILD)/tests/%=run-%)
LONGEST := $(foreach t,$(KERNEL_TESTS) $(LONG_TESTS),$(filter run-$(t),$(RUN_ALL)))
RUN := $(LONGEST) $(filter-out $(LONGEST),$(RUN_ALL))
# Programs that need a GPU (tests/gpu/campaign.sh runs them) are compiled here, and their parts that a scripted GPU can play are run by suites.
GPU_TESTS := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/gpu/*.c))
check: all $(BUILD)/tests/libfakecuda.so $(BUILD)/tests/libfakegpu.so $(TESTS) $(GPU_TESTS)
	@$(MAKE) $(PARALLEL) --keep-going $(RUN) $(if $(SANITIZE),,check-python)
	@echo "$(BUILD): all $(words $(TESTS)) suites passed"
.PHONY: $(RUN)
$(RUN): run-%:
	@start=$$(date +%s); log=$(BUILD)/tests/$*.log; locks=$(abspath $(BUILD))/tests/$*.locks; shown='tail -n 1'; verdict=; code=0; mkdir -p $$locks; \
	  MOEFORGE_LOCK_DIR=$$locks $(CHECK_ENV) $(BUILD)/tests/$* >$$log 2>&1 || { code=$$?; shown=cat; verdict=", FAILED with exit code $$code"; }; \
	  printf '== %s, %d s%s\n%s\n' $(BUILD)/tests/$* $$(($$(date +%s) - start)) "$$verdict" "$$($$shown $$log)"; exit $$code
# Limits of single tests: generous, since a machine may be busy with other things.
CHECK_ENV := CK_DEFAULT_TIMEOUT=60 CK_TIMEOUT_MULTIPLIER=$(if $(SANITIZE),4 ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1,2)

# The Python package: standard library only. What needs torch is skipped without it; the last line says how much. (Not with SANITIZE=1: Python has no ASan.)
PYTHON ?= python3
check-python: $(BUILD)/moeforge $(BUILD)/libmoeforge.so $(BUILD)/tests/python_packages $(BUILD)/tests/libfakecuda.so $(BUILD)/tests/libfakegpu.so
	@log=$(BUILD)/tests/python.log; shown='tail -n 1'; verdict=; code=0; \
	  MOEFORGE_BUILD=$(BUILD) PYTHONDONTWRITEBYTECODE=1 $(PYTHON) -m unittest discover -s python/tests -t python/tests >$$log 2>&1 || \
	    { code=$$?; shown=cat; verdict=", FAILED"; }; \
	  printf '== python/tests%s\n%s %s\n' "$$verdict" "$$(sed -n 's/^Ran \([0-9]* tests\).*/\1:/p' $$log)" "$$($$shown $$log)"; exit $$code
wheel: $(BUILD)/libmoeforge.so
	@MOEFORGE_LIBRARY=$< $(PYTHON) python/build_backend.py $(BUILD)/wheel

# One file per run of clang-tidy: with several it takes a va_list of the second for uninitialised.
LINT_SRC := $(filter-out tuner/main.c,$(TUNER_SRC)) tuner/main.c $(RUNTIME_SRC) $(EMU_SRC)
LINT_HDR := $(wildcard include/*.h runtime/*.h tuner/*.h emu/*.h templates/*.h templates/*/*.h)
lint:
	@$(MAKE) $(PARALLEL) --keep-going $(BUILD)/lint/cppcheck.ok $(LINT_SRC:%.c=$(BUILD)/lint/%.ok)
	@echo "lint: $(words $(LINT_SRC)) files clean"
$(BUILD)/lint/cppcheck.ok: $(LINT_SRC) $(LINT_HDR) Makefile
	@mkdir -p $(@D)
	@echo "  cppcheck"
	@cppcheck --quiet --std=c11 --enable=warning,performance,portability --inline-suppr --suppress=missingIncludeSystem --error-exitcode=1 -Iinclude -Iruntime -Ituner -Itemplates -Iemu tuner runtime emu
	@touch $@
$(BUILD)/lint/%.ok: %.c $(LINT_HDR) .clang-tidy
	@mkdir -p $(@D)
	@echo "  clang-tidy $<"
	@clang-tidy --quiet $< -- $(CPPFLAGS) -std=c11 2>$@.err || { cat $@.err >&2; exit 1; }
	@rm $@.err; touch $@

# PREFIX is where things will be used, DESTDIR a folder that stands for / while a distribution package is made.
PREFIX ?= /usr/local
VERSION = $(shell sed -n 's/^\#define MOEFORGE_VERSION "\(.*\)"/\1/p' tuner/main.c)
install: all
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/share/moeforge
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@VERSION@|$(VERSION)|' runtime/moeforge.pc.in >$(DESTDIR)$(PREFIX)/lib/pkgconfig/moeforge.pc
	chmod 644 $(DESTDIR)$(PREFIX)/lib/pkgconfig/moeforge.pc
	install -m 755 $(BUILD)/moeforge $(DESTDIR)$(PREFIX)/bin/
	install -m 755 $(BUILD)/libmoeforge.so $(DESTDIR)$(PREFIX)/lib/libmoeforge.so.1
	ln -sf libmoeforge.so.1 $(DESTDIR)$(PREFIX)/lib/libmoeforge.so
	install -m 644 $(BUILD)/libmoeforge.a $(DESTDIR)$(PREFIX)/lib/
	install -m 644 include/moeforge.h $(DESTDIR)$(PREFIX)/include/
	cp -r templates specs $(DESTDIR)$(PREFIX)/share/moeforge/
	install -d $(DESTDIR)$(PREFIX)/share/moeforge/emu
	install -m 644 emu/hw_host.h emu/emu_hw.h $(DESTDIR)$(PREFIX)/share/moeforge/emu/

clean:
	rm -rf build build-asan
