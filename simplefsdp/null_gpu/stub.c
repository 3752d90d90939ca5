/* A GPU that does nothing, as a library that is loaded before CUDA's own.

   It answers for libcuda, libcudart, libcublas, libcublasLt and libnccl: one device, memory that is the host's (reserved
   and not touched), streams and events that are numbers, kernels and collectives that return at once. Values mean
   nothing. What is launched, issued, recorded, awaited and copied is logged, one line each, when logging is on:

       THREAD CPU_NS UNIX_NS KIND<tab>field=value<tab>...

   THREAD is the kernel's thread id, CPU_NS the CPU time of that thread and UNIX_NS the time of day, in nanoseconds.
   log.py has the kinds and their fields. The macros NULL_GPU_NAME ... NULL_GPU_L2 describe the device; launch.py defines them. */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* The log ---------------------------------------------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char* text;
static size_t used, capacity;
static int logging;

void null_gpu_log(int value) { logging = value; }

/* Copies the log to `into` and empties it, if `size` bytes are enough; returns how many bytes the log has. */
size_t null_gpu_take(char* into, size_t size) {
    pthread_mutex_lock(&lock);
    size_t length = used;
    if (into && size >= used) {
        memcpy(into, text, used);
        used = 0;
    }
    pthread_mutex_unlock(&lock);
    return length;
}

static void add(const char* format, ...) {
    if (!logging) return;
    char line[2048];
    struct timespec cpu, now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);
    clock_gettime(CLOCK_REALTIME, &now);
    int head = snprintf(line, 96, "%ld %lld %lld ", (long)syscall(SYS_gettid),
                        cpu.tv_sec * 1000000000LL + cpu.tv_nsec, now.tv_sec * 1000000000LL + now.tv_nsec);
    va_list values;
    va_start(values, format);
    int body = vsnprintf(line + head, sizeof line - head - 1, format, values);
    va_end(values);
    size_t length = head + body < (int)sizeof line - 2 ? head + body : sizeof line - 2;
    line[length++] = '\n';
    pthread_mutex_lock(&lock);
    if (used + length > capacity) text = realloc(text, capacity = 2 * (used + length + 4096));
    memcpy(text + used, line, length);
    used += length;
    pthread_mutex_unlock(&lock);
}

void null_gpu_note(const char* what) { add("note\ttext=%s", what); }

/* What kernels are called ------------------------------------------------------------------------------------------ */

#define SLOTS (1 << 18)
static struct { const void* key; const char* name; int registers, local_bytes; } kernels[SLOTS];

static size_t slot_of(const void* key) {
    size_t i = ((size_t)key * 0x9E3779B97F4A7C15UL) >> 46;
    while (kernels[i].key && kernels[i].key != key) i = (i + 1) % SLOTS;
    return i;
}

static void name_kernel(const void* key, const char* name, int registers, int local_bytes) {
    size_t i = slot_of(key);
    kernels[i].key = key;
    kernels[i].name = name;
    kernels[i].registers = registers;
    kernels[i].local_bytes = local_bytes;
}

static const char* name_of(const void* key) {
    size_t i = slot_of(key);
    return kernels[i].key ? kernels[i].name : "?";
}

void** __cudaRegisterFatBinary(void* binary) { static void* handle[2]; return handle; }
void __cudaRegisterFatBinaryEnd(void** handle) {}
void __cudaUnregisterFatBinary(void** handle) {}
void __cudaRegisterVar(void** handle, char* host, char* address, const char* name, int external, size_t size,
                       int constant, int global) {}
void __cudaRegisterFunction(void** handle, const char* host, char* device, const char* name, int limit, void* tid,
                            void* bid, void* block, void* grid, int* warp) { name_kernel(host, name, 32, 0); }

/* The runtime: device and memory ----------------------------------------------------------------------------------- */

#define OK cudaSuccess
typedef cudaError_t E;
typedef cudaStream_t S;
typedef cudaEvent_t V;

static size_t id_of(const void* handle) { return (size_t)handle; }

E cudaGetDeviceCount(int* count) { *count = 1; return OK; }
E cudaGetDevice(int* device) { *device = 0; return OK; }
E cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : OK; }
E cudaDriverGetVersion(int* version) { *version = CUDART_VERSION + 80; return OK; }
E cudaGetLastError(void) { return OK; }
E cudaPeekAtLastError(void) { return OK; }

#undef cudaGetDeviceProperties
E cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, NULL_GPU_NAME);
    p->major = NULL_GPU_MAJOR;
    p->minor = NULL_GPU_MINOR;
    p->multiProcessorCount = NULL_GPU_MULTIPROCESSORS;
    p->totalGlobalMem = NULL_GPU_MEMORY;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = NULL_GPU_SHARED;
    p->sharedMemPerMultiprocessor = NULL_GPU_SHARED + 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->l2CacheSize = NULL_GPU_L2;
    p->memoryBusWidth = 5120;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
    p->totalConstMem = 65536;
    p->textureAlignment = 512;
    p->asyncEngineCount = 3;
    return OK;
}
E cudaGetDeviceProperties_v2(struct cudaDeviceProp* p, int device) { return cudaGetDeviceProperties(p, device); }

static int attribute(int which) {
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return NULL_GPU_MAJOR;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return NULL_GPU_MINOR;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return NULL_GPU_MULTIPROCESSORS;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return NULL_GPU_SHARED;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return NULL_GPU_SHARED + 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return NULL_GPU_L2;
    default: return 0;
    }
}
E cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr which, int device) { *value = attribute(which); return OK; }
E cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return OK; }
E cudaDeviceCanAccessPeer(int* can, int one, int other) { *can = 0; return OK; }
E cudaMemGetInfo(size_t* available, size_t* total) { *available = *total = NULL_GPU_MEMORY; return OK; }

static void* reserve(size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* address = mmap(0, bytes ? bytes : 1, PROT_READ | PROT_WRITE, flags, -1, 0);
    return address == MAP_FAILED ? 0 : address;
}

#define MAX_PINNED 4096
static struct { char *begin, *end; } pinned[MAX_PINNED];
static int pinned_count;

static int is_pinned(const void* address) {
    for (int i = 0; i < pinned_count; i++)
        if ((char*)address >= pinned[i].begin && (char*)address < pinned[i].end) return 1;
    return 0;
}
static void pin(void* address, size_t bytes) {
    pthread_mutex_lock(&lock);
    if (pinned_count < MAX_PINNED) {
        pinned[pinned_count].begin = address;
        pinned[pinned_count++].end = (char*)address + bytes;
    }
    pthread_mutex_unlock(&lock);
}

E cudaMalloc(void** address, size_t bytes) {
    add("malloc\tbytes=%zu", bytes);
    return (*address = reserve(bytes)) ? OK : cudaErrorMemoryAllocation;
}
E cudaFree(void* address) { return OK; }
E cudaMallocHost(void** address, size_t bytes) {
    if (!(*address = reserve(bytes))) return cudaErrorMemoryAllocation;
    pin(*address, bytes);
    return OK;
}
E cudaHostAlloc(void** address, size_t bytes, unsigned flags) { return cudaMallocHost(address, bytes); }
E cudaFreeHost(void* address) { return OK; }
E cudaHostRegister(void* address, size_t bytes, unsigned flags) { pin(address, bytes); return OK; }
E cudaHostUnregister(void* address) { return OK; }
E cudaPointerGetAttributes(struct cudaPointerAttributes* a, const void* address) {
    memset(a, 0, sizeof *a);
    a->type = is_pinned(address) ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->devicePointer = a->hostPointer = (void*)address;
    return OK;
}

/* Small values survive copies; large copies move nothing, as they would touch memory that is only reserved: while Triton
   times a kernel's configurations, TorchInductor saves what the kernel changes to the host, gigabytes for an embedding. */
static void copy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind) {
    if (bytes <= (kind == cudaMemcpyDeviceToDevice ? 4096 : 1 << 20)) memcpy(to, from, bytes);
}
static int host_side_is_pinned(const void* to, const void* from, enum cudaMemcpyKind kind) {
    return is_pinned(kind == cudaMemcpyDeviceToHost ? to : from);
}
E cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind) {
    add("copy\tstream=0\tdirection=%d\tbytes=%zu\tblocking=1", kind, bytes);
    copy(to, from, bytes, kind);
    return OK;
}
E cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind, S stream) {
    int blocking = kind == cudaMemcpyDeviceToHost && !host_side_is_pinned(to, from, kind);
    add("copy\tstream=%zu\tdirection=%d\tbytes=%zu\tblocking=%d", id_of(stream), kind, bytes, blocking);
    copy(to, from, bytes, kind);
    return OK;
}
E cudaMemset(void* to, int value, size_t bytes) { add("fill\tstream=0\tbytes=%zu", bytes); return OK; }
E cudaMemsetAsync(void* to, int value, size_t bytes, S stream) {
    add("fill\tstream=%zu\tbytes=%zu", id_of(stream), bytes);
    return OK;
}

/* The runtime: streams and events ---------------------------------------------------------------------------------- */

static size_t next_handle = 1;
static void* new_handle(void) { return (void*)(__sync_fetch_and_add(&next_handle, 1) * 16); }

/* While work is pending nothing that was recorded has happened yet, whoever asks. Otherwise torch leaves out waits. */
static int pending;
void null_gpu_pending(int value) { pending = value; }

E cudaStreamCreate(S* stream) { *stream = new_handle(); return OK; }
E cudaStreamCreateWithFlags(S* stream, unsigned flags) { return cudaStreamCreate(stream); }
E cudaStreamCreateWithPriority(S* stream, unsigned flags, int priority) { return cudaStreamCreate(stream); }
E cudaStreamDestroy(S stream) { return OK; }
E cudaStreamQuery(S stream) { return pending ? cudaErrorNotReady : OK; }
E cudaStreamIsCapturing(S stream, enum cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return OK;
}
#undef cudaStreamGetCaptureInfo
E cudaStreamGetCaptureInfo(S stream, enum cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                           const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
    *status = cudaStreamCaptureStatusNone;
    return OK;
}
E cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) { return OK; }
E cudaEventCreate(V* event) { *event = new_handle(); return OK; }
E cudaEventCreateWithFlags(V* event, unsigned flags) { return cudaEventCreate(event); }
E cudaEventDestroy(V event) { return OK; }
E cudaEventQuery(V event) { return pending ? cudaErrorNotReady : OK; }
E cudaEventElapsedTime(float* ms, V begin, V end) { *ms = 1.0f; return OK; }
E cudaEventRecord(V event, S stream) {
    add("record\tstream=%zu\tevent=%zu", id_of(stream), id_of(event));
    return OK;
}
E cudaEventRecordWithFlags(V event, S stream, unsigned flags) { return cudaEventRecord(event, stream); }
E cudaStreamWaitEvent(S stream, V event, unsigned flags) {
    add("wait\tstream=%zu\tevent=%zu", id_of(stream), id_of(event));
    return OK;
}
E cudaEventSynchronize(V event) { add("sync\twhat=event\thandle=%zu", id_of(event)); return OK; }
E cudaStreamSynchronize(S stream) { add("sync\twhat=stream\thandle=%zu", id_of(stream)); return OK; }
E cudaDeviceSynchronize(void) { add("sync\twhat=device\thandle=0"); return OK; }

/* The runtime: kernels --------------------------------------------------------------------------------------------- */

/* The first argument of torch's elementwise kernels is how many elements they work on. */
static E launch(const void* function, dim3 grid, dim3 block, void** arguments, S stream) {
    const char* name = name_of(function);
    int elements = strstr(name, "elementwise_kernel") && arguments && arguments[0] ? *(int*)arguments[0] : -1;
    add("kernel\tstream=%zu\tblocks=%u\tthreads=%u\telements=%d\tname=%s", id_of(stream), grid.x * grid.y * grid.z,
        block.x * block.y * block.z, elements, name);
    return OK;
}
E cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared, S stream) {
    return launch(function, grid, block, arguments, stream);
}
E cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* function, void** arguments) {
    return launch(function, c->gridDim, c->blockDim, arguments, c->stream);
}
E __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, S stream) {
    return launch(kernel, grid, block, arguments, stream);
}
E __cudaGetKernel(cudaKernel_t* kernel, const void* function) { *kernel = (cudaKernel_t)function; return OK; }
static __thread struct { dim3 grid, block; size_t shared; S stream; } pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, S stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}
E __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(S*)stream = pushed.stream;
    return OK;
}
E cudaFuncGetAttributes(struct cudaFuncAttributes* a, const void* function) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->binaryVersion = a->ptxVersion = 10 * NULL_GPU_MAJOR + NULL_GPU_MINOR;
    return OK;
}
E cudaFuncSetAttribute(const void* function, enum cudaFuncAttribute which, int value) { return OK; }
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* f, int threads, size_t shared) {
    *n = 2;
    return OK;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* f, int threads, size_t shared,
                                                         unsigned flags) {
    *n = 2;
    return OK;
}
E cudaProfilerStart(void) { return OK; }
E cudaProfilerStop(void) { return OK; }
static CUresult succeed() { return CUDA_SUCCESS; }
#undef cudaGetDriverEntryPointByVersion
E cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long flags,
                                   enum cudaDriverEntryPointQueryResult* result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = (void*)succeed;
    if (result) *result = cudaDriverEntryPointSuccess;
    return OK;
}

/* The driver ------------------------------------------------------------------------------------------------------- */

#define DRIVER(name, parameters, ...) CUresult name parameters { __VA_ARGS__; return CUDA_SUCCESS; }
#undef cuDeviceGetUuid
DRIVER(cuInit, (unsigned flags), )
DRIVER(cuDriverGetVersion, (int* version), *version = CUDA_VERSION + 80)
DRIVER(cuDeviceGetCount, (int* count), *count = 1)
DRIVER(cuDeviceGet, (CUdevice* device, int i), *device = 0)
DRIVER(cuDeviceGetName, (char* name, int size, CUdevice device), strncpy(name, NULL_GPU_NAME, size))
DRIVER(cuDeviceGetAttribute, (int* value, CUdevice_attribute which, CUdevice device), *value = attribute(which))
DRIVER(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned* flags, int* active), *flags = 0; *active = 1)
#undef cuDevicePrimaryCtxRetain
DRIVER(cuDevicePrimaryCtxRetain, (CUcontext* context, CUdevice device), *context = (CUcontext)16)
DRIVER(cuCtxGetCurrent, (CUcontext* context), *context = (CUcontext)16)
DRIVER(cuCtxSetCurrent, (CUcontext context), )
DRIVER(cuCtxGetDevice, (CUdevice* device), *device = 0)
DRIVER(cuCtxSetLimit, (CUlimit which, size_t value), )
DRIVER(cuCtxGetLimit, (size_t* value, CUlimit which), *value = 0)
DRIVER(cuGetErrorString, (CUresult error, const char** name), *name = "an error of the null GPU")
DRIVER(cuGetErrorName, (CUresult error, const char** name), *name = "NULL_GPU")

/* Registers of a cubin's kernel and the bytes of its stack frame, which is where ptxas spills to: both are in the
   section .nv.info, as records (format, attribute, size or value; a symbol and a number if the format is 4). */
static void* load(const char* image) {
    enum { FRAME_SIZE = 0x11, REGISTERS = 0x2f, WITH_SIZE = 4 };
    const char* name = "?";
    int registers = 0, local_bytes = 0;
    const Elf64_Ehdr* header = (const void*)image;
    if (!memcmp(header->e_ident, ELFMAG, SELFMAG)) {
        const Elf64_Shdr* sections = (const void*)(image + header->e_shoff);
        const char* strings = image + sections[header->e_shstrndx].sh_offset;
        for (int i = 0; i < header->e_shnum; i++) {
            const char* section = strings + sections[i].sh_name;
            if (!strncmp(section, ".text.", 6)) name = strdup(section + 6);
            if (strcmp(section, ".nv.info")) continue;
            const unsigned char* at = (const void*)(image + sections[i].sh_offset);
            const unsigned char* end = at + sections[i].sh_size;
            while (at + 4 <= end) {
                int size = at[0] == WITH_SIZE ? at[2] + 256 * at[3] : 0, number;
                if (size == 8) {
                    memcpy(&number, at + 8, 4);
                    if (at[1] == FRAME_SIZE && number > local_bytes) local_bytes = number;
                    if (at[1] == REGISTERS && number > registers) registers = number;
                }
                at += 4 + size;
            }
        }
    }
    void* module = malloc(16);
    name_kernel(module, name, registers, local_bytes);
    add("module\tregisters=%d\tlocal_bytes=%d\tname=%s", registers, local_bytes, name);
    return module;
}
DRIVER(cuModuleLoadData, (CUmodule* module, const void* image), *module = load(image))
CUresult cuModuleLoad(CUmodule* module, const char* path) {
    FILE* file = fopen(path, "rb");
    if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    char* image = malloc(size);
    size = fread(image, 1, size, file);
    fclose(file);
    *module = load(image);
    free(image);
    return CUDA_SUCCESS;
}
DRIVER(cuModuleUnload, (CUmodule module), )
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    size_t i = slot_of(module);
    *function = malloc(16);
    name_kernel(*function, strdup(name), kernels[i].registers, kernels[i].local_bytes);
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction function) {
    size_t i = slot_of(function);
    *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? kernels[i].registers
             : which == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES ? kernels[i].local_bytes
             : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
DRIVER(cuFuncSetAttribute, (CUfunction function, CUfunction_attribute which, int value), )
DRIVER(cuFuncSetCacheConfig, (CUfunction function, CUfunc_cache config), )
DRIVER(cuOccupancyMaxActiveClusters, (int* n, CUfunction function, const CUlaunchConfig* config), *n = 1)
#undef cuOccupancyMaxActiveBlocksPerMultiprocessor
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int* n, CUfunction f, int threads, size_t shared), *n = 2)
static void launched(CUfunction function, unsigned blocks, unsigned threads, CUstream stream) {
    add("kernel\tstream=%zu\tblocks=%u\tthreads=%u\telements=-1\tname=%s", id_of(stream), blocks, threads,
        name_of(function));
}
#undef cuLaunchKernel
#undef cuLaunchKernelEx
DRIVER(cuLaunchKernel, (CUfunction function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                        unsigned shared, CUstream stream, void** arguments, void** extra),
       launched(function, x * y * z, a * b * c, stream))
DRIVER(cuLaunchKernelEx, (const CUlaunchConfig* c, CUfunction function, void** arguments, void** extra),
       launched(function, c->gridDimX * c->gridDimY * c->gridDimZ, c->blockDimX * c->blockDimY * c->blockDimZ,
                c->hStream))
#undef cuStreamIsCapturing
DRIVER(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus* status), *status = 0)
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr address) {
    if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)value = address;
    else if (which == CU_POINTER_ATTRIBUTE_CONTEXT) *(CUcontext*)value = (CUcontext)16;
    else *(int*)value = 0;
    return CUDA_SUCCESS;
}
DRIVER(cuPointerGetAttributes, (unsigned n, CUpointer_attribute* which, void** values, CUdeviceptr address), )
DRIVER(cuTensorMapEncodeTiled,
       (CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* shape,
        const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides,
        CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
        CUtensorMapFloatOOBfill fill), )

/* cuBLAS and cuBLASLt: every call succeeds. A handle's second word is its stream. ----------------------------------- */

#define SUCCEEDS(name) int name() { return 0; }
static const char* dtype_of(int type) {
    switch (type) {
    case 0: return "float32";
    case 2: return "float16";
    case 14: return "bfloat16";
    case 28: return "float8_e4m3fn";
    case 29: return "float8_e5m2";
    default: return "other";
    }
}
static void matmul(const void* stream, long m, long n, long k, long batch, const char* dtype) {
    add("matmul\tstream=%zu\tm=%ld\tn=%ld\tk=%ld\tbatch=%ld\tdtype=%s", id_of(stream), m, n, k, batch, dtype);
}
int cublasCreate_v2(void** handle) { *handle = calloc(1, 64); return 0; }
int cublasSetStream_v2(void** handle, S stream) { handle[1] = (void*)stream; return 0; }
int cublasGetMathMode(void* handle, int* mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void* handle, int* mode) { *mode = 0; return 0; }
SUCCEEDS(cublasDestroy_v2) SUCCEEDS(cublasSetWorkspace_v2) SUCCEEDS(cublasSetMathMode) SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSetSmCountTarget)
int cublasSgemm_v2(void** handle, int ta, int tb, int m, int n, int k) {
    matmul(handle[1], m, n, k, 1, "float32");
    return 0;
}
int cublasSgemmStridedBatched(void** handle, int ta, int tb, int m, int n, int k, const float* alpha, const float* a,
                              int lda, long long sa, const float* b, int ldb, long long sb, const float* beta, float* c,
                              int ldc, long long sc, int batch) {
    matmul(handle[1], m, n, k, batch, "float32");
    return 0;
}
int cublasGemmEx(void** handle, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int a_type) {
    matmul(handle[1], m, n, k, 1, dtype_of(a_type));
    return 0;
}
int cublasGemmStridedBatchedEx(void** handle, int ta, int tb, int m, int n, int k, const void* alpha, const void* a,
                               int a_type, int lda, long long sa, const void* b, int b_type, int ldb, long long sb,
                               const void* beta, void* c, int c_type, int ldc, long long sc, int batch) {
    matmul(handle[1], m, n, k, batch, dtype_of(a_type));
    return 0;
}
int cublasSgemmEx(void** handle, int ta, int tb, int m, int n, int k) {
    matmul(handle[1], m, n, k, 1, "other");
    return 0;
}
int cublasSgemv_v2(void** handle, int ta, int m, int n) { matmul(handle[1], m, n, 1, 1, "float32"); return 0; }
int cublasSdot_v2(void** handle, int n) { matmul(handle[1], 1, 1, n, 1, "float32"); return 0; }
int cublasDotEx(void** handle, int n) { matmul(handle[1], 1, 1, n, 1, "other"); return 0; }

/* A descriptor's first words are the transpositions; a layout is (dtype, rows, columns). */
int cublasLtCreate(void** handle) { *handle = malloc(16); return 0; }
int cublasLtMatmulDescCreate(void** description, int compute, int scale) { *description = calloc(1, 64); return 0; }
int cublasLtMatmulDescSetAttribute(int* description, int which, const void* value, size_t size) {
    if (which == 3) description[0] = *(const int*)value;
    if (which == 4) description[1] = *(const int*)value;
    return 0;
}
int cublasLtMatrixLayoutCreate(void** layout, int type, unsigned long rows, unsigned long columns, long leading) {
    long* made = calloc(1, 64);
    made[0] = type;
    made[1] = rows;
    made[2] = columns;
    *layout = made;
    return 0;
}
int cublasLtMatmul(void* handle, int* description, const void* alpha, const void* a, long* a_layout, const void* b,
                   long* b_layout, const void* beta, const void* c, long* c_layout, void* d, long* d_layout,
                   const void* algorithm, void* workspace, size_t size, S stream) {
    matmul(stream, d_layout[1], d_layout[2], description[0] ? a_layout[1] : a_layout[2], 1, dtype_of((int)a_layout[0]));
    return 0;
}
int cublasLtMatmulPreferenceCreate(void** preference) { *preference = malloc(16); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* description, void* a, void* b, void* c, void* d,
                                   void* preference, int wanted, void* results, int* found) {
    memset(results, 0, 96 * wanted);
    *found = wanted ? 1 : 0;
    return 0;
}
SUCCEEDS(cublasLtMatmulDescDestroy) SUCCEEDS(cublasLtMatrixLayoutDestroy) SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceDestroy) SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatmulAlgoCheck)

/* NCCL: the other ranks are not there, and nothing is exchanged. A communicator is (ranks, rank). ------------------- */

static const char* types[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
                              "bfloat16", "float8_e4m3fn", "float8_e5m2"};
static __thread int group_depth;
static long groups;
static __thread long group;
static int communicator(void** made, int ranks, int rank) {
    int* fields = calloc(1, 4096);
    fields[0] = ranks;
    fields[1] = rank;
    *made = fields;
    return 0;
}
static void collective(const char* kind, const void* send, const void* receive, size_t count, int type, int op,
                       const int* comm, S stream) {
    add("collective\tstream=%zu\toperation=%s\tranks=%d\tcommunicator=%zu\tdtype=%s\telements=%zu\top=%d\tsend=%zu"
        "\treceive=%zu\tgroup=%ld", id_of(stream), kind, comm[0], id_of(comm), types[type], count, op, id_of(send),
        id_of(receive), group_depth ? group : 0);
}
typedef struct { char bytes[128]; } UniqueId;
int ncclGetVersion(int* version) { *version = 23007; return 0; }
int ncclGetUniqueId(void* id) { memset(id, 1, sizeof(UniqueId)); return 0; }
int ncclCommInitRank(void** made, int ranks, UniqueId id, int rank) { return communicator(made, ranks, rank); }
int ncclCommInitRankConfig(void** made, int ranks, UniqueId id, int rank, void* config) {
    return communicator(made, ranks, rank);
}
int ncclCommInitRankScalable(void** made, int ranks, int rank, int ids, UniqueId* id, void* config) {
    return communicator(made, ranks, rank);
}
/* ncclCommSplit learns how many ranks a part has from the ranks that come, so somebody has to say it before. */
static int split_ranks;
void null_gpu_split(int ranks) { split_ranks = ranks; }
int ncclCommSplit(void* whole, int color, int key, void** made, void* config) {
    return split_ranks ? communicator(made, split_ranks, 0) : 5; /* ncclInvalidUsage */
}
int ncclCommGetAsyncError(void* comm, int* error) { *error = 0; return 0; }
int ncclCommCount(int* comm, int* ranks) { *ranks = comm[0]; return 0; }
int ncclCommUserRank(int* comm, int* rank) { *rank = comm[1]; return 0; }
const char* ncclGetErrorString(int error) { return "an error of the null GPU"; }
const char* ncclGetLastError(void* comm) { return "an error of the null GPU"; }
int ncclMemAlloc(void** address, size_t bytes) { *address = reserve(bytes); return 0; }
SUCCEEDS(ncclMemFree) SUCCEEDS(ncclCommDestroy) SUCCEEDS(ncclCommAbort) SUCCEEDS(ncclCommFinalize)
SUCCEEDS(ncclCommRegister) SUCCEEDS(ncclCommDeregister) SUCCEEDS(ncclCommWindowRegister)
SUCCEEDS(ncclCommWindowDeregister) SUCCEEDS(ncclRedOpDestroy)
int ncclGroupStart() {
    if (!group_depth++) group = __sync_add_and_fetch(&groups, 1);
    return 0;
}
int ncclGroupEnd() { group_depth--; return 0; }
int ncclRedOpCreatePreMulSum(int* op) { *op = 5; return 0; }
int ncclAllGather(const void* send, void* receive, size_t count, int type, void* comm, S stream) {
    collective("all_gather", send, receive, count, type, -1, comm, stream);
    return 0;
}
int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int op, void* comm, S stream) {
    collective("reduce_scatter", send, receive, count, type, op, comm, stream);
    return 0;
}
int ncclAllReduce(const void* send, void* receive, size_t count, int type, int op, void* comm, S stream) {
    collective("all_reduce", send, receive, count, type, op, comm, stream);
    return 0;
}
int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, void* comm, S stream) {
    collective("broadcast", send, receive, count, type, -1, comm, stream);
    return 0;
}
int ncclBcast(void* data, size_t count, int type, int root, void* comm, S stream) {
    return ncclBroadcast(data, data, count, type, root, comm, stream);
}
int ncclSend(const void* send, size_t count, int type, int peer, void* comm, S stream) {
    collective("send", send, send, count, type, -1, comm, stream);
    return 0;
}
int ncclRecv(void* receive, size_t count, int type, int peer, void* comm, S stream) {
    collective("receive", receive, receive, count, type, -1, comm, stream);
    return 0;
}
