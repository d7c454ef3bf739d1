/* A pretend libnvidia-ml.so.1. It reads the text file named by FAKE_NVML_CONFIG anew in every call, so that a test may
 * change the machine while it runs. A line is `KEY VALUE`; bytes are taken as they are.
 *
 *   init 18               nvmlInit returns this code
 *   count 2               number of GPUs
 *   0.uuid GPU-...        a figure of GPU 0; a figure that is not there is "not supported"; `!4` returns code 4
 *   0.state 15            every call about GPU 0 returns this code
 *   0.needs_new_session 1 once lost, it stays lost until NVML is shut down and started again
 *   0.mig 2               MIG devices (0.mig0.uuid, 0.mig1.uuid, ...); 0.mig_mode 1 turns MIG on
 *   0.field138 7          a field value; 0.type138 its nvmlValueType (3, 64 bits, by default)
 *   0.gpm2 50             a GPM metric
 *
 * -DOLD_DRIVER leaves out what old drivers lack.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, LOST = 15 };
enum { MAX_GPUS = 16, MAX_COUNTED = 512, WHOLE = 63 };

typedef struct { unsigned version; uint64_t total, reserved, free, used; } MemoryV2;
typedef struct { uint64_t total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned version, sensor; int temperature; } TemperatureV1;
typedef struct {
    uint32_t field, scope;
    int64_t timestamp, latency;
    unsigned type, code;
    union { double d; unsigned ui; uint64_t ull; } value;
} FieldValue;
typedef struct { unsigned version, supported; } GpmSupport;
typedef struct { unsigned id, code; double value; const char *texts[3]; } GpmMetric;
typedef struct { unsigned version, count; void *first, *second; GpmMetric metrics[]; } GpmGet;
typedef struct { int gpu; } GpmSample;

static int sessions, generation = 1, num_samples;
static int lost_in[MAX_GPUS];
static struct { char name[64]; int gpu, count; } counted[MAX_COUNTED];

static void count_call(const char *name, int gpu) {
    for (int i = 0; i < MAX_COUNTED; i++) {
        if (!counted[i].name[0]) {
            snprintf(counted[i].name, sizeof counted[i].name, "%s", name);
            counted[i].gpu = gpu;
        }
        if (counted[i].gpu == gpu && !strcmp(counted[i].name, name)) {
            counted[i].count++;
            return;
        }
    }
}

/* How often NAME was called for a GPU (-1: about none). */
int fake_calls(const char *name, int gpu) {
    for (int i = 0; i < MAX_COUNTED && counted[i].name[0]; i++)
        if (counted[i].gpu == gpu && !strcmp(counted[i].name, name)) return counted[i].count;
    return 0;
}

int fake_samples(void) { return num_samples; }

int fake_sessions(void) { return sessions; }

static int find(const char *key, char *value, size_t size) {
    const char *path = getenv("FAKE_NVML_CONFIG");
    FILE *file = path ? fopen(path, "rb") : NULL;
    char line[512];
    int found = 0;
    size_t length = strlen(key);
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, key, length) && line[length] == ' ') {
            snprintf(value, size, "%s", line + length + 1);
            found = 1;
        }
    }
    if (file) fclose(file);
    return found;
}

static long setting(const char *key, long otherwise) {
    char value[256];
    return find(key, value, sizeof value) ? atol(value) : otherwise;
}

static void *make_handle(int gpu, int mig) {
    return (void *)(intptr_t)(((intptr_t)generation << 16) | (gpu << 8) | ((mig < 0 ? WHOLE : mig) << 1) | 1);
}

static int gpu_of(void *handle) { return ((intptr_t)handle >> 8) & 0xff; }

static int mig_of(void *handle) {
    int mig = ((intptr_t)handle >> 1) & 0x7f;
    return mig == WHOLE ? -1 : mig;
}

static int gpu_state(int gpu) {
    char key[64];
    snprintf(key, sizeof key, "%d.state", gpu);
    int state = setting(key, OK);
    snprintf(key, sizeof key, "%d.needs_new_session", gpu);
    if (state) lost_in[gpu] = generation;
    else if (lost_in[gpu] == generation && setting(key, 0)) return LOST;
    return state;
}

static int enter(const char *function, void *handle) {
    count_call(function, gpu_of(handle));
    if (!sessions) return UNINITIALIZED;
    if ((intptr_t)handle >> 16 != generation) return INVALID_ARGUMENT;
    return gpu_state(gpu_of(handle));
}

static int text(void *handle, const char *figure, char *value, size_t size) {
    char key[96];
    if (mig_of(handle) < 0) snprintf(key, sizeof key, "%d.%s", gpu_of(handle), figure);
    else snprintf(key, sizeof key, "%d.mig%d.%s", gpu_of(handle), mig_of(handle), figure);
    if (!find(key, value, size)) return NOT_SUPPORTED;
    return value[0] == '!' ? atoi(value + 1) : OK;
}

static int number(void *handle, const char *figure, uint64_t *result) {
    char value[256];
    int code = text(handle, figure, value, sizeof value);
    if (code == OK) *result = strtoull(value, NULL, 10);
    return code;
}

static int ask(const char *function, void *handle, const char *figure, uint64_t *result) {
    int code = enter(function, handle);
    return code ? code : number(handle, figure, result);
}

static int ask_unsigned(const char *function, void *handle, const char *figure, unsigned *result) {
    uint64_t value = 0;
    int code = ask(function, handle, figure, &value);
    if (code == OK) *result = (unsigned)value;
    return code;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    count_call("nvmlInitWithFlags", -1);
    int code = setting("init", OK);
    if (code == OK) sessions++;
    return code;
}

int nvmlShutdown(void) {
    if (!sessions) return UNINITIALIZED;
    if (--sessions == 0) generation++;
    return OK;
}

const char *nvmlErrorString(int code) {
    static char words[64];
    snprintf(words, sizeof words, "pretended error %d", code);
    return words;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!sessions) return UNINITIALIZED;
    char value[64];
    if (find("count", value, sizeof value) && value[0] == '!') return atoi(value + 1);
    *count = setting("count", 0);
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (!sessions) return UNINITIALIZED;
    if ((long)index >= setting("count", 0)) return INVALID_ARGUMENT;
    *handle = make_handle(index, -1);
    return gpu_state(index);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    char value[256], key[64];
    if (!sessions) return UNINITIALIZED;
    for (int gpu = 0; gpu < setting("count", 0); gpu++) {
        snprintf(key, sizeof key, "%d.mig", gpu);
        int num_migs = setting(key, 0);
        for (int mig = -1; mig < num_migs; mig++) {
            *handle = make_handle(gpu, mig);
            if (text(*handle, "uuid", value, sizeof value) == OK && !strcmp(value, uuid)) return gpu_state(gpu);
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *handle, char *value, unsigned size) {
    int code = enter(__func__, handle);
    return code ? code : text(handle, "uuid", value, size);
}

int nvmlDeviceGetName(void *handle, char *value, unsigned size) {
    int code = enter(__func__, handle);
    return code ? code : text(handle, "name", value, size);
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    int code = ask(__func__, handle, "memory_total", &memory->total);
    return code ? code : number(handle, "memory_used", &memory->used);
}

int nvmlDeviceGetUtilizationRates(void *handle, Utilization *rates) {
    uint64_t gpu = 0, memory = 0;
    int code = ask(__func__, handle, "utilisation", &gpu);
    if (code == OK) code = number(handle, "memory_utilisation", &memory);
    rates->gpu = gpu;
    rates->memory = memory;
    return code;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *value) {
    return ask_unsigned(__func__, handle, "power", value);
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *value) {
    return ask_unsigned(__func__, handle, "power_limit", value);
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, uint64_t *value) {
    return ask(__func__, handle, "energy", value);
}

int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *value) {
    (void)sensor;
    return ask_unsigned(__func__, handle, "temperature", value);
}

int nvmlDeviceGetClockInfo(void *handle, unsigned type, unsigned *value) {
    char figure[32];
    snprintf(figure, sizeof figure, "clock%u", type);
    return ask_unsigned(__func__, handle, figure, value);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, uint64_t *value) {
    return ask(__func__, handle, "throttle", value);
}

int nvmlDeviceGetFieldValues(void *handle, int count, FieldValue *values) {
    int code = enter(__func__, handle);
    char figure[32];
    uint64_t type, value;
    for (int i = 0; code == OK && i < count; i++) {
        snprintf(figure, sizeof figure, "field%u", values[i].field);
        values[i].code = number(handle, figure, &value);
        if ((values[i].field == 138 || values[i].field == 139) && values[i].scope != 0xffffffffu)
            values[i].code = INVALID_ARGUMENT;
        snprintf(figure, sizeof figure, "type%u", values[i].field);
        values[i].type = number(handle, figure, &type) == OK ? type : 3;
        values[i].value.ull = 0xdeadbeefdeadbeefu;
        if (values[i].type == 1) values[i].value.ui = value;
        else values[i].value.ull = value;
    }
    return code;
}

int nvmlDeviceGetPcieThroughput(void *handle, unsigned which, unsigned *value) {
    return ask_unsigned(__func__, handle, which ? "pcie_rx" : "pcie_tx", value);
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    *pending = 0;
    return ask_unsigned(__func__, handle, "mig_mode", current);
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    *count = 7;
    return enter(__func__, handle);
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **mig) {
    uint64_t count = 0;
    number(handle, "mig", &count);
    *mig = make_handle(gpu_of(handle), index);
    return index < count ? enter(__func__, handle) : NOT_FOUND;
}

int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *value) {
    return ask_unsigned(__func__, handle, "gpu_instance", value);
}

int nvmlDeviceGetComputeInstanceId(void *handle, unsigned *value) {
    return ask_unsigned(__func__, handle, "compute_instance", value);
}

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *memory) {
    int code = ask(__func__, handle, "memory_total", &memory->total);
    return code ? code : number(handle, "memory_used", &memory->used);
}

int nvmlDeviceGetTemperatureV(void *handle, TemperatureV1 *temperature) {
    uint64_t value = 0;
    int code = ask(__func__, handle, "temperature", &value);
    temperature->temperature = (int)value;
    return code;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, uint64_t *value) {
    return ask(__func__, handle, "throttle", value);
}

int nvmlGpmQueryDeviceSupport(void *handle, GpmSupport *support) {
    uint64_t value = 0;
    int code = ask(__func__, handle, "gpm", &value);
    support->supported = value;
    return code;
}

int nvmlGpmSampleAlloc(GpmSample **sample) {
    *sample = calloc(1, sizeof **sample);
    num_samples++;
    return OK;
}

int nvmlGpmSampleFree(GpmSample *sample) {
    free(sample);
    num_samples--;
    return OK;
}

int nvmlGpmSampleGet(void *handle, GpmSample *sample) {
    sample->gpu = gpu_of(handle);
    return enter(__func__, handle);
}

int nvmlGpmMigSampleGet(void *handle, unsigned gpu_instance, GpmSample *sample) {
    (void)gpu_instance;
    sample->gpu = gpu_of(handle);
    return enter(__func__, handle);
}

int nvmlGpmMetricsGet(GpmGet *request) {
    int gpu = ((GpmSample *)request->first)->gpu;
    char figure[32], value[64];
    if (gpu != ((GpmSample *)request->second)->gpu || request->version != 1) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < request->count; i++) {
        snprintf(figure, sizeof figure, "gpm%u", request->metrics[i].id);
        request->metrics[i].code = text(make_handle(gpu, -1), figure, value, sizeof value);
        request->metrics[i].value = request->metrics[i].code ? -1 : atof(value);
    }
    return OK;
}
#endif
