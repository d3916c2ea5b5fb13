// libcudart over host memory, as far as engine/cuda/cuda_memory.py calls it: an allocation is a memory file, a handle
// says in which process it is found. Signatures and error numbers are those of cuda_runtime_api.h and driver_types.h.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct Handle { char reserved[64]; };
struct Attributes { int type, device; void *device_pointer, *host_pointer; char reserved[64]; };
struct Told { uint32_t magic; int32_t pid, fd; uint64_t size; char rest[40]; };  // inside a handle
struct Mapping { char* base; uint64_t size; int32_t pid, fd, count; };  // pid is 0: our own

static Mapping mappings[64];
static int last_error;
enum { OUT_OF_MEMORY = 2, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, MAP_FAILED_ = 205, INVALID_HANDLE = 400 };

static int fail(int error) { return last_error = error; }

static Mapping* find(const void* address) {
    for (Mapping& one : mappings)
        if (one.base && address >= one.base && address < one.base + one.size) return &one;
    return nullptr;
}

static int add(void** address, int fd, uint64_t size, int32_t pid, int32_t their_fd) {
    for (Mapping& one : mappings) {
        if (one.base) continue;
        void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) return fail(OUT_OF_MEMORY);
        one = {static_cast<char*>(base), size, pid, their_fd, 1};
        *address = base;
        return 0;
    }
    return fail(OUT_OF_MEMORY);
}

static void remove(Mapping* one) {
    munmap(one->base, one->size);
    if (!one->pid) close(one->fd);
    *one = {};
}

extern "C" {
int cudaSetDevice(int device) { return device ? fail(INVALID_DEVICE) : 0; }

int cudaMalloc(void** address, size_t size) {
    if (!size || size > (1ull << 30)) return fail(OUT_OF_MEMORY);
    int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (ftruncate(fd, size)) return fail(OUT_OF_MEMORY);
    if (int error = add(address, fd, size, 0, fd)) return error;
    memset(*address, 0xAA, size);  // not zeroed
    return 0;
}

int cudaFree(void* address) {
    Mapping* one = find(address);
    if (!one || one->base != address || one->pid) return fail(INVALID_VALUE);
    remove(one);
    return 0;
}

int cudaIpcGetMemHandle(Handle* handle, void* address) {
    Mapping* one = find(address);
    if (!one || one->pid) return fail(INVALID_VALUE);
    Told told = {0xBA70, getpid(), one->fd, one->size, {}};
    told.rest[39] = 7;  // handles have zeros in the middle and something at the end
    memcpy(handle, &told, sizeof told);
    return 0;
}

int cudaIpcOpenMemHandle(void** address, Handle handle, unsigned flags) {
    Told told;
    memcpy(&told, &handle, sizeof told);
    if (flags != 1) return fail(INVALID_VALUE);
    if (told.magic != 0xBA70 || told.rest[39] != 7) return fail(INVALID_HANDLE);
    if (told.pid == getpid()) return fail(INVALID_CONTEXT);
    for (Mapping& one : mappings)
        if (one.base && one.pid == told.pid && one.fd == told.fd) {
            one.count++;
            *address = one.base;
            return 0;
        }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", told.pid, told.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return fail(MAP_FAILED_);
    int error = add(address, fd, told.size, told.pid, told.fd);
    close(fd);
    return error;
}

int cudaIpcCloseMemHandle(void* address) {
    Mapping* one = find(address);
    if (!one || one->base != address || !one->pid) return fail(INVALID_VALUE);
    if (!--one->count) remove(one);
    return 0;
}

int cudaMemcpyAsync(void* target, const void* source, size_t size, int kind, void*) {
    if (kind != 4) return fail(INVALID_VALUE);
    memcpy(target, source, size);
    return 0;
}

int cudaPointerGetAttributes(Attributes* found, const void* address) {
    *found = {};
    found->type = find(address) ? 2 : 0;
    return 0;
}

int cudaDeviceGetP2PAttribute(int* found, int attribute, int own, int peer) {
    *found = attribute == 3 && own != peer;
    return 0;
}

int cudaGetLastError() {
    int error = last_error;
    last_error = 0;
    return error;
}

const char* cudaGetErrorString(int error) {
    switch (error) {
        case INVALID_VALUE: return "invalid argument";
        case OUT_OF_MEMORY: return "out of memory";
        case INVALID_DEVICE: return "invalid device ordinal";
        case INVALID_CONTEXT: return "invalid device context";
        case MAP_FAILED_: return "mapping of buffer object failed";
        case INVALID_HANDLE: return "invalid resource handle";
        default: return "unrecognized error code";
    }
}
}
