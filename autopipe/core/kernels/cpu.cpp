// What this CPU can run, and the version of the C interface.
#include "common.h"

#if AUTOPIPE_X86
#include <cpuid.h>

namespace {

struct Registers {
    unsigned eax, ebx, ecx, edx;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r{0, 0, 0, 0};
    if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {0, 0, 0, 0};
    return r;
}

// Register state the operating system saves on a context switch (XCR0).
unsigned long long saved_state() {
    if (!(cpuid(1, 0).ecx & (1u << 27))) return 0;  // OSXSAVE
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<unsigned long long>(high) << 32) | low;
}

bool bit(unsigned word, int index) { return (word >> index) & 1u; }

bool has_avx2_fma() {
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
    return (saved_state() & 0x6) == 0x6 && bit(one.ecx, 12) /* FMA */ && bit(one.ecx, 28) /* AVX */ &&
           bit(seven.ebx, 5) /* AVX2 */;
}

bool has_avx512() {
    const Registers seven = cpuid(7, 0);
    return has_avx2_fma() && (saved_state() & 0xe6) == 0xe6 && bit(seven.ebx, 16) /* F */ &&
           bit(seven.ebx, 17) /* DQ */ && bit(seven.ebx, 30) /* BW */ && bit(seven.ebx, 31) /* VL */;
}

bool has_avx512_vnni() { return has_avx512() && bit(cpuid(7, 0).ecx, 11); }

bool has_bf16() { return has_avx512_vnni() && bit(cpuid(7, 1).eax, 5); }

bool is_intel() {
    unsigned eax, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == 0x756e6547u /* Genu */;
}

}  // namespace
#endif

bool autopipe::has_vnni() {
#if AUTOPIPE_X86
    static const bool found = has_avx512_vnni();
    return found;
#else
    return false;
#endif
}

AUTOPIPE_API int autopipe_abi_version() { return AUTOPIPE_ABI_VERSION; }

// 1 when the CPU and operating system have the instruction set (see AutopipeIsa).
AUTOPIPE_API int autopipe_cpu_has(int isa) {
#if AUTOPIPE_X86
    switch (isa) {
        case kIsaAvx512Bf16: return has_bf16();
        case kIsaAvx512: return has_avx512();
        case kIsaAvx2: return has_avx2_fma();
    }
#endif
    (void)isa;
    return 0;
}

// The fastest instruction set here, or 0. A fixed rule, not a measurement: the choice decides how results round, and
// must not change from run to run. Intel's bf16 product takes four times the cycles of an fp32 multiply-add for twice
// the work (Sapphire Rapids: 0.9 against 3.8 thousand million a second), AMD's (Zen 4) no more than two.
AUTOPIPE_API int autopipe_best_isa() {
#if AUTOPIPE_X86
    if (has_bf16() && !is_intel()) return kIsaAvx512Bf16;
    if (has_avx512()) return kIsaAvx512;
    if (has_avx2_fma()) return kIsaAvx2;
#endif
    return 0;
}
