// CUDA's runtime library as onnxruntime's provider calls it, for a machine without a GPU. The device's memory is the host's; a
// kernel does nothing, but its launch is checked as a device would check it, and told; so are copies and allocations. It says that
// it is an H100. What is not here is stubbed by build.py.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

static std::mutex lock;
static std::unordered_map<const void *, std::string> kernels;  // host function -> name
static std::unordered_map<const void *, size_t> blocks;        // of the device's memory -> bytes
static size_t used = 0;
static const size_t memory = size_t(8) << 30;
static thread_local cudaError_t last = cudaSuccess;
static thread_local struct { dim3 grid, block; size_t shared; cudaStream_t stream; } pushed;

static cudaError_t fail(cudaError_t error) { return last = error; }

static void tell(const char *what, size_t number, const char *name) {
    static FILE *file = std::getenv("FAKE_CUDA_LOG") ? std::fopen(std::getenv("FAKE_CUDA_LOG"), "a") : nullptr;
    if (!file) return;
    std::lock_guard<std::mutex> held(lock);
    std::fprintf(file, "%s %zu %s\n", what, number, name);
    std::fflush(file);
}

static cudaError_t launch(const void *kernel, dim3 grid, dim3 block, size_t shared) {
    bool possible = grid.x && grid.y && grid.z && grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535 && block.x && block.y &&
                    block.z && size_t(block.x) * block.y * block.z <= 1024 && shared <= 227 * 1024;
    tell(possible ? "launch" : "impossible", size_t(grid.x) * grid.y * grid.z, kernels[kernel].c_str());
    return possible ? cudaSuccess : fail(cudaErrorInvalidConfiguration);
}

extern "C" {
void **__cudaRegisterFatBinary(void *) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) { kernels[function] = name; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) { pushed = {grid, block, shared, stream}; return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(cudaStream_t *)stream = pushed.stream;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **, size_t shared, cudaStream_t) { return launch(kernel, grid, block, shared); }
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **, size_t shared, cudaStream_t) { return launch(kernel, grid, block, shared); }
cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **, size_t shared, cudaStream_t) { return launch(kernel, grid, block, shared); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *kernel, void **) { return launch(kernel, c->gridDim, c->blockDim, c->dynamicSmemBytes); }

cudaError_t cudaMalloc(void **place, size_t size) {
    std::lock_guard<std::mutex> held(lock);
    if (used + size > memory || posix_memalign(place, 512, size ? size : 1)) return *place = nullptr, fail(cudaErrorMemoryAllocation);
    blocks[*place] = size, used += size;
    return cudaSuccess;
}
cudaError_t cudaFree(void *place) {
    std::lock_guard<std::mutex> held(lock);
    used -= blocks[place], blocks.erase(place), std::free(place);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **place, size_t size) { tell("page-locked", size, ""); return posix_memalign(place, 4096, size) ? fail(cudaErrorMemoryAllocation) : cudaSuccess; }
cudaError_t cudaHostAlloc(void **place, size_t size, unsigned) { return posix_memalign(place, 4096, size) ? fail(cudaErrorMemoryAllocation) : cudaSuccess; }
cudaError_t cudaFreeHost(void *place) { std::free(place); return cudaSuccess; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    tell(kind == cudaMemcpyHostToDevice ? "to device" : kind == cudaMemcpyDeviceToHost ? "to host" : "within", size, "");
    std::memcpy(to, from, size);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t) { return cudaMemcpy(to, from, size, kind); }
cudaError_t cudaMemset(void *place, int value, size_t size) { std::memset(place, value, size); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *place, int value, size_t size, cudaStream_t) { std::memset(place, value, size); return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *left, size_t *whole) { *left = memory - used, *whole = memory; return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *place) {
    std::lock_guard<std::mutex> held(lock);
    *a = {}, a->type = blocks.count(place) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered, a->devicePointer = (void *)place;
    return cudaSuccess;
}
size_t fake_cuda_used() { return used; }

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    *p = {}, std::strcpy(p->name, "fake"), p->major = 9, p->multiProcessorCount = 132, p->totalGlobalMem = memory, p->warpSize = 32;
    p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 48 * 1024, p->sharedMemPerBlockOptin = 227 * 1024, p->sharedMemPerMultiprocessor = 228 * 1024;
    p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 * 1024; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 * 1024; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        default: *value = 1;
    }
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, const void *) { *a = {}, a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = a->ptxVersion = 90; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *, int, size_t, unsigned) { *count = 1; return cudaSuccess; }

cudaError_t cudaGetLastError() { cudaError_t error = last; last = cudaSuccess; return error; }
cudaError_t cudaPeekAtLastError() { return last; }
const char *cudaGetErrorName(cudaError_t error) { return error == cudaErrorInvalidConfiguration ? "impossible launch" : error == cudaErrorMemoryAllocation ? "out of memory" : "error"; }
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaEventCreate(cudaEvent_t *event) { *event = (cudaEvent_t)std::malloc(1); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { std::free(event); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { *stream = (cudaStream_t)std::malloc(1); return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { std::free(stream); return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) { *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) { function(data); return cudaSuccess; }
}
