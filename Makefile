# moeforge. `make tune` and `make test` do everything on a bare Debian or Ubuntu machine; see README.md.
#   make                 the tool: build/moeforge, and the runtime library: build/libmoeforge.{a,so}
#   make tune            tunes SPEC (a small one without a GPU) and shows the winners
#   make test            builds, analyses and tests everything that needs no GPU
#   make check           the test suites only        SANITIZE=1: with ASan and UBSan, in build-asan/
#   make lint            cppcheck and clang-tidy; files that have not changed since are not looked at again
#   STATIC=1             links libyaml, SQLite and jansson statically, so that build/moeforge runs elsewhere

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
LIBS     := -Wl,-Bstatic -lyaml -lsqlite3 -ljansson -Wl,-Bdynamic -lpthread -ldl -lm
else
LIBS     := -lyaml -lsqlite3 -ljansson -lpthread -ldl -lm
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
# These execute kernels on the emulated device for minutes. They are not run a second time with sanitizers: what they run of our own code is in other suites, too.
KERNEL_TESTS := test_emu_matrix test_emu_mutants test_emu_routing test_emu_shapes
TESTS       := $(filter-out $(if $(SANITIZE),$(KERNEL_TESTS:%=$(BUILD)/tests/%)),$(TEST_SRC:tests/%.c=$(BUILD)/tests/%))
# Kernels that are compiled for the emulated device call back into the program: the whole emulator is linked, and what exports.txt lists is exported.
EMU_LINK    := -Wl,--whole-archive $(BUILD)/libemu.a -Wl,--no-whole-archive -Wl,--dynamic-list=emu/exports.txt
EMU_DEPS    := $(BUILD)/libemu.a emu/exports.txt

# Object files of tests are kept.
.SECONDARY:
.PHONY: all tune test everything check check-sanitized lint clean install bootstrap
all: $(BUILD)/moeforge $(BUILD)/libmoeforge.so

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
everything: all check check-sanitized lint
check-sanitized:
	@$(MAKE) SANITIZE=1 BUILD=$(BUILD)-asan check

# A suite prints its result, all that it said if it failed, and its seconds. The longest ones start first.
LONGEST := $(filter $(KERNEL_TESTS:%=run-%) run-test_tune% run-test_fuzz run-test_trace run-test_cli%,$(TESTS:$(BUILD)/tests/%=run-%))
RUN := $(LONGEST) $(filter-out $(LONGEST),$(TESTS:$(BUILD)/tests/%=run-%))
check: $(BUILD)/moeforge $(BUILD)/libmoeforge.so $(BUILD)/tests/libfakecuda.so $(BUILD)/tests/libfakegpu.so $(TESTS)
	@$(MAKE) $(PARALLEL) --keep-going $(RUN)
	@echo "$(BUILD): all $(words $(TESTS)) suites passed"
.PHONY: $(RUN)
$(RUN): run-%:
	@start=$$(date +%s); log=$(BUILD)/tests/$*.log; shown='tail -n 1'; verdict=; code=0; \
	  $(CHECK_ENV) $(BUILD)/tests/$* >$$log 2>&1 || { code=$$?; shown=cat; verdict=", FAILED with exit code $$code"; }; \
	  printf '== %s, %d s%s\n%s\n' $(BUILD)/tests/$* $$(($$(date +%s) - start)) "$$verdict" "$$($$shown $$log)"; exit $$code
# Limits of single tests: generous, since a machine may be busy with other things.
CHECK_ENV := CK_DEFAULT_TIMEOUT=60 CK_TIMEOUT_MULTIPLIER=$(if $(SANITIZE),4 ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1,2)

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

PREFIX ?= /usr/local
install: all
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/share/moeforge
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
