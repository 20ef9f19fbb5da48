// Data types and reductions. 16-bit floats are added in fp32 and rounded after each rank, as a ring of GPUs does.
#include "null_nccl.h"

#include <string.h>

size_t type_size(int type) {
    switch (type) {
        case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
        case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
        default: return 0;
    }
}

const char *type_name(int type) {
    static const char *names[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "fp16", "fp32", "fp64", "bf16", "fp8_e4m3", "fp8_e5m2"};
    return type_size(type) ? names[type] : "unknown type";
}

bool reducible(int type) { return type_size(type) && type != ncclFloat8e4m3 && type != ncclFloat8e5m2; }

static float float_of_half(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
}

static uint16_t half_of_float(float number) {
    _Float16 value = (_Float16)number;
    uint16_t bits;
    memcpy(&bits, &value, 2);
    return bits;
}

static float float_of_bfloat(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t bfloat_of_float(float number) {
    uint32_t wide;
    memcpy(&wide, &number, 4);
    if (number != number) return 0x7fc0;
    return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;  // to nearest, ties to even
}

double scalar_of(const void *value, int type) {
    switch (type) {
        case ncclFloat16: return float_of_half(*(const uint16_t *)value);
        case ncclBfloat16: return float_of_bfloat(*(const uint16_t *)value);
        case ncclFloat32: return *(const float *)value;
        case ncclFloat64: return *(const double *)value;
        case ncclInt8: return *(const int8_t *)value;
        case ncclUint8: return *(const uint8_t *)value;
        case ncclInt32: return *(const int32_t *)value;
        case ncclUint32: return *(const uint32_t *)value;
        case ncclInt64: return (double)*(const int64_t *)value;
        default: return (double)*(const uint64_t *)value;
    }
}

#define COMBINE(total, value)                                        \
    switch (op) {                                                    \
        case ncclProd: total = total * (value); break;               \
        case ncclMax: total = total < (value) ? (value) : total; break; \
        case ncclMin: total = total > (value) ? (value) : total; break; \
        default: total = total + (value);                            \
    }

// Numbers are stored as TYPE and computed as WIDE.
#define REDUCE(NAME, TYPE, WIDE, LOAD, STORE)                                                                     \
    static void NAME(TYPE *target, const TYPE *const *sources, int num, size_t count, int op, WIDE factor, int divisor) { \
        for (size_t at = 0; at < count; at++) {                                                                   \
            TYPE stored = STORE((WIDE)(LOAD(sources[0][at]) * factor));                                           \
            for (int rank = 1; rank < num; rank++) {                                                              \
                WIDE total = LOAD(stored);                                                                        \
                const WIDE value = LOAD(STORE((WIDE)(LOAD(sources[rank][at]) * factor)));                         \
                COMBINE(total, value)                                                                             \
                stored = STORE(total);                                                                            \
            }                                                                                                     \
            target[at] = divisor == 1 ? stored : STORE((WIDE)(LOAD(stored) / divisor));                           \
        }                                                                                                         \
    }
#define SAME(value) (value)
REDUCE(reduce_int8, int8_t, int8_t, SAME, SAME)
REDUCE(reduce_uint8, uint8_t, uint8_t, SAME, SAME)
REDUCE(reduce_int32, int32_t, int32_t, SAME, SAME)
REDUCE(reduce_uint32, uint32_t, uint32_t, SAME, SAME)
REDUCE(reduce_int64, int64_t, int64_t, SAME, SAME)
REDUCE(reduce_uint64, uint64_t, uint64_t, SAME, SAME)
REDUCE(reduce_float, float, float, SAME, SAME)
REDUCE(reduce_double, double, double, SAME, SAME)
REDUCE(reduce_half, uint16_t, float, float_of_half, half_of_float)
REDUCE(reduce_bfloat, uint16_t, float, float_of_bfloat, bfloat_of_float)

// target[count] = op over num arrays. An average scales floats before they are added and divides integers afterwards.
void reduce(void *target, const void *const *sources, int num, size_t count, int type, int op, const Scaled *scaled) {
    bool is_float = type == ncclFloat16 || type == ncclBfloat16 || type == ncclFloat32 || type == ncclFloat64;
    double factor = scaled ? scaled->factor : op == ncclAvg && is_float ? 1.0 / num : 1.0;
    int divisor = op == ncclAvg && !is_float ? num : 1;
    switch (type) {
        case ncclInt8: reduce_int8(target, (void *)sources, num, count, op, factor, divisor); break;
        case ncclUint8: reduce_uint8(target, (void *)sources, num, count, op, factor, divisor); break;
        case ncclInt32: reduce_int32(target, (void *)sources, num, count, op, factor, divisor); break;
        case ncclUint32: reduce_uint32(target, (void *)sources, num, count, op, factor, divisor); break;
        case ncclInt64: reduce_int64(target, (void *)sources, num, count, op, factor, divisor); break;
        case ncclUint64: reduce_uint64(target, (void *)sources, num, count, op, factor, divisor); break;
        case ncclFloat32: reduce_float(target, (void *)sources, num, count, op, factor, divisor); break;
        case ncclFloat64: reduce_double(target, (void *)sources, num, count, op, factor, divisor); break;
        case ncclFloat16: reduce_half(target, (void *)sources, num, count, op, factor, divisor); break;
        case ncclBfloat16: reduce_bfloat(target, (void *)sources, num, count, op, factor, divisor); break;
        default: break;  // calls.c refuses other types
    }
}
