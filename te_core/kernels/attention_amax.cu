// Raise up to four maxima to what an FP8 graph of cuDNN has found, and make its places zeros again. A thread a maximum,
// which lie four floats apart; several may go to one place (dq, dk and dv share a scale). The first one is at least
// `least`: cuDNN's forward tells the largest probability, but quantizes exp(score - largest score), which goes up to 1.
#include "common/numeric.cuh"

extern "C" __global__ void attention_amax(float* found, float* a, float* b, float* c, float* d, float least) {
    float* const places[4] = {a, b, c, d};
    const int k = threadIdx.x;
    const float value = k ? found[4 * k] : fmaxf(found[0], least);
    found[4 * k] = 0.f;
    if (places[k]) atomic_raise(places[k], value);
}
