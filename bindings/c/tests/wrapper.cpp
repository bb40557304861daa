// wrapper STUB FILE: te_core.hpp on the stub of CUDA's libraries, with an arena of the host's.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "te_core.hpp"

namespace {

struct Arena {
    int alive = 0, taken = 0;
    bool empty = false;
    void *alloc(size_t bytes, size_t alignment, void *) {
        if (empty) return nullptr;
        alive++, taken++;
        return std::aligned_alloc(alignment < 256 ? 256 : alignment, (bytes < 256 ? 256 : 4096));
    }
    void free(void *address, void *) {
        alive--;
        std::free(address);
    }
};

int failures = 0;
void expect(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "not so: %s\n", what);
    failures++;
}

void run(te::Runtime &rt, const std::vector<char> &content, Arena &arena) {
    te::Program program{rt, content.data(), content.size()};
    te::Program moved{std::move(program)};
    expect(moved.entries()[1] == "backward", "entries");
    const te::Entry forward = moved["forward"];
    const std::vector<te_slot> slots = forward.slots();
    std::vector<DLTensor> tensors(slots.size());
    std::vector<DLTensor *> inputs, outputs;
    for (size_t i = 0; i < slots.size(); i++) {
        const bool given = slots[i].role <= TE_STATE;
        tensors[i].data = given ? reinterpret_cast<void *>(0x7f0000000000 + 65536 * i) : nullptr;
        tensors[i].device = {kDLCUDA, 0};
        tensors[i].ndim = slots[i].ndim;
        tensors[i].dtype = slots[i].dtype;
        tensors[i].shape = const_cast<int64_t *>(slots[i].shape);
        (given ? inputs : outputs).push_back(&tensors[i]);
    }
    forward.prepare();
    forward.run(inputs, outputs);
    expect(arena.taken > 3 && outputs[0]->data != nullptr, "outputs are allocated");
    for (DLTensor *t : outputs) arena.free(t->data, nullptr), t->data = nullptr;
    arena.empty = true;
    try {
        forward.run(inputs, outputs);
        expect(false, "an empty arena is an error");
    } catch (const te::Error &error) {
        expect(error.status == TE_MEMORY && error.step >= 0 && !error.to_do.empty(), error.what());
    }
    arena.empty = false;
    try {
        moved["sideward"];
        expect(false, "a name of no entry is an error");
    } catch (const te::Error &error) {
        expect(error.got.find("sideward") != std::string::npos, error.what());
    }
    expect(forward.block_bytes() % 256 == 0, "a block's bytes");
}

}  // namespace

int main(int count, char **words) {
    if (count != 3) return 2;
    setenv("TE_LIBCUDA", words[1], 1);
    setenv("TE_LIBCUBLASLT", words[1], 1);
    setenv("TE_LIBCUDNN", words[1], 1);
    std::ifstream file(words[2], std::ios::binary);
    const std::vector<char> content{std::istreambuf_iterator<char>(file), {}};
    Arena arena;
    {
        te::Runtime rt{0, nullptr, arena};
        run(rt, content, arena);
        rt.synchronize();
    }
    expect(arena.alive == 0, "all memory came back");
    return failures != 0;
}
