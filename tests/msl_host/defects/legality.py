"""What Metal's compiler or a launch would refuse."""

from typing import Any

import mlx.core as mx
import numpy as np

from tests.msl_host.defects.defect import PAIR, THREAD, Defect


def _many() -> dict[str, Any]:
    return {f"a{index}": np.zeros(8, np.float32) for index in range(32)}


def _twice() -> dict[str, Any]:
    pool = np.zeros(64, np.float32)
    return {"k": pool, "v": pool[32:]}


LEGALITY = [
    Defect(
        "pointer without address space",
        "legality",
        THREAD
        + """
        const device float* p = a;
        o[i] = first(p);""",
        part="header",
        line=1,
        header="inline float first(const float* p) { return p[0]; }",
        says="'p' has no address space",
    ),
    Defect(
        "local pointer without address space",
        "legality",
        THREAD
        + """
        float x = a[i];
        float* p = &x;
        o[i] = *p;""",
        line=3,
        says="'p'",
    ),
    Defect(
        "reference without address space",
        "legality",
        THREAD
        + """
        float x = a[i];
        add(x);
        o[i] = x;""",
        part="header",
        line=2,
        header="\ninline void add(float& x) { x += 1.0f; }",
    ),
    Defect(
        "double",
        "compile",
        THREAD
        + """
        double x = a[i];
        o[i] = float(x);""",
        line=2,
    ),
    Defect(
        "recursion",
        "legality",
        THREAD
        + """
        o[i] = deep(i);""",
        header="float deep(uint n) { return n == 0 ? 0.0f : 1.0f + deep(n - 1); }",
        says="recursion",
    ),
    Defect(
        "goto",
        "legality",
        THREAD
        + """
        if (i > 3) goto end;
        o[i] = 0.0f;
        end: o[i] = a[i];""",
        line=2,
    ),
    Defect(
        "lambda",
        "legality",
        THREAD
        + """
        auto twice = [](float x) { return x * 2.0f; };
        o[i] = twice(a[i]);""",
        line=2,
    ),
    Defect(
        "lambda that captures",
        "legality",
        THREAD
        + """
        auto plus = [=](float x) { return x + a[i]; };
        o[i] = plus(1.0f);""",
        line=2,
    ),
    Defect(
        "static variable",
        "legality",
        THREAD
        + """
        static int calls = 0;
        o[i] = a[i];""",
        line=2,
    ),
    Defect(
        "program-scope variable",
        "legality",
        THREAD
        + """
        o[i] = a[i] + bias;""",
        part="header",
        line=1,
        header="float bias = 1.0f;",
    ),
    Defect(
        "program-scope constant not in constant",
        "legality",
        THREAD
        + """
        o[i] = a[i] + bias;""",
        part="header",
        line=1,
        header="static constexpr float bias = 1.0f;",
    ),
    Defect(
        "function pointer",
        "compile",
        THREAD
        + """
        float (*f)(float) = twice;
        o[i] = f(a[i]);""",
        line=2,
        header="inline float twice(float x) { return x * 2.0f; }",
    ),
    Defect(
        "virtual function",
        "compile",
        THREAD
        + """
        o[i] = a[i];""",
        part="header",
        line=1,
        header="struct V { virtual float f() { return 1.0f; } };",
    ),
    Defect(
        "threadgroup variable in a nested scope",
        "compile",
        THREAD
        + """
        {
          threadgroup float s[4];
          s[0] = a[i];
        }
        o[i] = a[i];""",
        line=3,
    ),
    Defect(
        "threadgroup variable in a helper",
        "compile",
        THREAD
        + """
        o[i] = helper(a[i]);""",
        part="header",
        line=1,
        header="inline float helper(float x) { threadgroup float s[4]; s[0] = x; return s[0]; }",
    ),
    Defect(
        "threadgroup variable with a value",
        "compile",
        THREAD
        + """
        threadgroup float s[2] = {1.0f, 2.0f};
        o[i] = s[0];""",
        line=2,
    ),
    Defect(
        "device pointer into threadgroup memory",
        "compile",
        THREAD
        + """
        threadgroup float s[64];
        device float* p = s;
        o[i] = p[0];""",
        line=3,
    ),
    Defect(
        "small input handed to a device pointer",
        "compile",
        THREAD
        + """
        o[i] = first(a);""",
        line=2,
        inputs=lambda: {"a": np.ones(7, np.float32)},
        header="inline float first(const device float* p) { return p[0]; }",
    ),
    Defect(
        "float to bfloat without a cast",
        "compile",
        THREAD
        + """
        bfloat b = a[i];
        o[i] = float(b);""",
        line=2,
    ),
    Defect(
        "bfloat to half without a cast",
        "compile",
        THREAD
        + """
        half h = bfloat(a[i]);
        o[i] = float(h);""",
        line=2,
    ),
    Defect(
        "max of float and int",
        "compile",
        THREAD
        + """
        o[i] = max(a[i], 1);""",
        line=2,
    ),
    Defect(
        "min of uint and int",
        "compile",
        THREAD
        + """
        o[i] = a[min(i, 3)];""",
        line=2,
    ),
    Defect(
        "std::",
        "compile",
        THREAD
        + """
        o[i] = std::max(a[i], 1.0f);""",
        line=2,
    ),
    Defect(
        "new",
        "compile",
        THREAD
        + """
        device float* p = new float[4];
        o[i] = a[i];""",
        line=2,
    ),
    Defect(
        "array of variable length",
        "compile",
        THREAD
        + """
        float x[i + 1];
        o[i] = a[i];""",
        line=2,
    ),
    Defect(
        "no result",
        "compile",
        THREAD
        + """
        o[i] = none(a[i]);""",
        part="header",
        line=1,
        header="inline float none(float x) { }",
    ),
    Defect(
        "forgotten typename",
        "compile",
        THREAD
        + """
        Traits<T>::type x = a[i];
        o[i] = x;""",
        line=2,
        header="template <class T> struct Traits { typedef T type; };",
        template=(("T", mx.float32),),
    ),
    Defect(
        "forgotten template",
        "compile",
        THREAD
        + """
        o[i] = a[i] + T(Traits<T>::get<N>());""",
        line=2,
        header="template <class T> struct Traits { template <int K> static T get() { return T(K); } };",
        template=(("T", mx.float32), ("N", 3)),
    ),
    Defect(
        "printf",
        "compile",
        THREAD
        + """
        printf("%d", i);
        o[i] = a[i];""",
        line=2,
    ),
    Defect(
        "long vector",
        "legality",
        THREAD
        + """
        const device ulong4* p = (const device ulong4*)a;
        o[i] = float(p[i % 8].x);""",
        says="over 16 bytes",
    ),
    Defect("2048 threads", "launch", THREAD + "o[i] = a[i];", grid=(2048, 1, 1), threadgroup=(2048, 1, 1)),
    Defect("empty grid", "launch", THREAD + "o[i] = a[i];", grid=(0, 1, 1)),
    Defect("too many buffers", "launch", THREAD + "o[i] = a0[0];", inputs=_many, says="33 buffers"),
    Defect("negative template argument", "launch", THREAD + "o[i] = a[i] + float(N);", template=(("N", -1),)),
    Defect(
        "written in place but maybe copied",
        "launch",
        THREAD + "o[i] = a[i];",
        in_place=("a",),
        ensure_row_contiguous=True,
    ),
    Defect(
        "written in place in constant",
        "launch",
        THREAD + "o[i] = 0.0f;",
        in_place=("a",),
        inputs=lambda: {"a": np.ones(7, np.float32)},
    ),
    Defect(
        "one pool given as K and V",
        "launch",
        THREAD + "o[i] = 0.0f;",
        in_place=("k",),
        inputs=_twice,
        says="shares memory with 'v'",
    ),
    Defect("in-place input misspelt", "launch", THREAD + "o[i] = 0.0f;", in_place=("b",), says="does not have: b"),
    Defect("several outputs, a shape, no attribute", "launch", "o[0] = a[a_shape[0] - 1]; p[0] = 0.0f;", outputs=PAIR),
]
