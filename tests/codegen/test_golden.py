"""One whole small module per direction, so that a change in generated code is seen in review.

Goldens hold for the torch they were made with.
"""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase

from cp_inductor import cross_compile
from tests.support.graphs import attend_causal
from tests.support.wrapper import normalize

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="goldens were made with torch 2.13"
)


def code_of_last_of_two() -> dict[str, str]:
    shape = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    query = torch.empty(1, 2, 16, 16, **shape)
    key = torch.empty(1, 1, 16, 16, **shape)
    options = {"strategy": "ring", "schedule": "local"}
    compiled = cross_compile(
        attend_causal, (query, key, key), world_size=2, rank=1, options=options
    )
    return {kind: normalize(code) for kind, code in compiled.code.items()}


class GoldenTest(TestCase):
    def test_forward(self) -> None:
        self.assertExpectedInline(
            code_of_last_of_two()["forward"],
            """\
def triton_poi_fused_attention_0(in_out_ptr0, in_ptr0, in_ptr1, in_ptr2, xnumel, XBLOCK : tl.constexpr):
    xnumel = 512
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x2 = xindex
    x1 = xindex // 16
    tmp0 = tl.load(in_out_ptr0 + (x2), xmask).to(tl.float32)
    tmp2 = tl.load(in_ptr0 + (x1), xmask, eviction_policy='evict_last')
    tmp3 = tl.load(in_ptr1 + (x1), xmask, eviction_policy='evict_last')
    tmp19 = tl.load(in_ptr2 + (x2), xmask).to(tl.float32)
    tmp1 = tmp0.to(tl.float32)
    tmp4 = triton_helpers.maximum(tmp2, tmp3)
    tmp5 = tl.full([1], float("-inf"), tl.float32)
    tmp6 = tmp4 == tmp5
    tmp7 = tl.full([1], 0.0, tl.float32)
    tmp8 = tl.where(tmp6, tmp7, tmp4)
    tmp9 = tmp2 - tmp8
    tmp10 = libdevice.exp(tmp9)
    tmp11 = tmp3 - tmp8
    tmp12 = libdevice.exp(tmp11)
    tmp13 = tmp10 + tmp12
    tmp14 = tmp13 == tmp7
    tmp15 = tl.full([1], 1.0, tl.float32)
    tmp16 = tl.where(tmp14, tmp15, tmp13)
    tmp17 = (tmp10 / tmp16)
    tmp18 = tmp1 * tmp17
    tmp20 = tmp19.to(tl.float32)
    tmp21 = (tmp12 / tmp16)
    tmp22 = tmp20 * tmp21
    tmp23 = tmp18 + tmp22
    tmp24 = tmp23.to(tl.float32)
    tl.store(in_out_ptr0 + (x2), tmp24, xmask)

def triton_poi_fused_attention_1(in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 32
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex
    tmp0 = tl.load(in_out_ptr0 + (x0), xmask)
    tmp1 = tl.load(in_ptr0 + (x0), xmask)
    tmp2 = triton_helpers.maximum(tmp0, tmp1)
    tmp3 = tl.full([1], float("-inf"), tl.float32)
    tmp4 = tmp2 == tmp3
    tmp5 = tl.full([1], 0.0, tl.float32)
    tmp6 = tl.where(tmp4, tmp5, tmp2)
    tmp7 = tmp0 - tmp6
    tmp8 = libdevice.exp(tmp7)
    tmp9 = tmp1 - tmp6
    tmp10 = libdevice.exp(tmp9)
    tmp11 = tmp8 + tmp10
    tmp12 = tl_math.log(tmp11)
    tmp13 = tmp12 + tmp6
    tl.store(in_out_ptr0 + (x0), tmp13, xmask)

def call(self, args):
    primals_1, primals_2, primals_3 = args
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((0, ), (1, ), torch.bfloat16)
        buf1 = torch.ops._c10d_functional.all_to_all_single.default(buf0, [512, 0], [0, 0], '0')
        primals_1 = copy_if_misaligned(primals_1)
        primals_2 = copy_if_misaligned(primals_2)
        primals_3 = copy_if_misaligned(primals_3)
        buf2 = torch.ops.aten._scaled_dot_product_cudnn_attention.default(primals_1, primals_2, primals_3, None, True, 0.0, True, scale=0.25)
        buf3 = buf2[0]
        buf4 = buf2[1]
        torch.ops._c10d_functional.wait_tensor.default(buf1)
        buf9 = torch.ops.aten._scaled_dot_product_cudnn_attention.default(primals_1, reinterpret_tensor(buf1, (1, 1, 16, 16), (32, 16, 32, 1), 0), reinterpret_tensor(buf1, (1, 1, 16, 16), (32, 16, 32, 1), 16), None, True, scale=0.25)
        buf10 = buf9[0]
        buf11 = buf9[1]
        buf15 = buf3; del buf3  # reuse
        triton_poi_fused_attention_0.run(buf15, buf4, buf11, buf10, 512, stream=raw_stream0)
        buf14 = reinterpret_tensor(buf4, (1, 2, 16), (32, 16, 1), 0); del buf4  # reuse
        triton_poi_fused_attention_1.run(buf14, buf11, 32, stream=raw_stream0)
    return (buf15, primals_1, primals_2, primals_3, buf15, buf14, )
""",
        )

    def test_backward(self) -> None:
        self.assertExpectedInline(
            code_of_last_of_two()["backward"],
            """\
def triton_poi_fused_attention_backward_0(out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 1
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = tl.full([XBLOCK], True, tl.int1)[:]
    tmp0 = tl.full([1], 0, tl.int64)
    tl.store(out_ptr0 + (tl.full([XBLOCK], 0, tl.int32)), tmp0, None)

def triton_poi_fused_attention_backward_1(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 512
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex
    tmp0 = (((x0 // 16) % 2)).to(tl.int32)
    tmp1 = tl.full([1], 0, tl.int64)
    tmp2 = tmp0 >= tmp1
    tmp3 = (((x0 // 16) % 2)).to(tl.int64)
    tmp4 = (tmp3).to(tl.int64)
    tmp5 = tl.full([1], 1, tl.int64)
    tmp6 = tmp4 < tmp5
    tmp7 = tl.load(in_ptr0 + (16*(x0 // 32) + ((((x0 % 32)) % 16))), tmp6 & xmask, other=0.0).to(tl.float32)
    tmp8 = tmp0 >= tmp5
    tmp9 = tl.full([1], 2, tl.int64)
    tmp10 = tmp0 < tmp9
    tmp11 = tl.load(in_ptr1 + (16*(x0 // 32) + ((((x0 % 32)) % 16))), tmp8 & xmask, other=0.0).to(tl.float32)
    tmp12 = tl.where(tmp6, tmp7, tmp11)
    tl.store(out_ptr0 + (x0), tmp12, xmask)

def triton_poi_fused_attention_backward_2(in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 512
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex
    tmp0 = tl.load(in_out_ptr0 + (x0), xmask).to(tl.float32)
    tmp2 = tl.load(in_ptr0 + (x0), xmask).to(tl.float32)
    tmp1 = tmp0.to(tl.float32)
    tmp3 = tmp2.to(tl.float32)
    tmp4 = tmp1 + tmp3
    tmp5 = tmp4.to(tl.float32)
    tl.store(in_out_ptr0 + (x0), tmp5, xmask)

def call(self, args):
    primals_1, primals_2, primals_3, getitem_5, getitem_6, tangents_1 = args
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((0, ), (1, ), torch.bfloat16)
        buf1 = torch.ops._c10d_functional.all_to_all_single.default(buf0, [512, 0], [0, 0], '0')
        buf2 = empty_strided_cuda((), (), torch.int64)
        triton_poi_fused_attention_backward_0.run(buf2, 1, stream=raw_stream0)
        tangents_1 = copy_if_misaligned(tangents_1)
        buf3 = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(tangents_1, primals_1, primals_2, primals_3, getitem_5, reinterpret_tensor(getitem_6, (1, 2, 16, 1), (32, 16, 1, 1), 0), buf2, buf2, None, None, None, 16, 16, 0.0, True, scale=0.25)
        buf4 = buf3[0]
        buf5 = buf3[1]
        buf6 = buf3[2]
        torch.ops._c10d_functional.wait_tensor.default(buf1)
        buf9 = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(tangents_1, primals_1, reinterpret_tensor(buf1, (1, 1, 16, 16), (32, 16, 32, 1), 0), reinterpret_tensor(buf1, (1, 1, 16, 16), (32, 16, 32, 1), 16), getitem_5, reinterpret_tensor(getitem_6, (1, 2, 16, 1), (32, 16, 1, 1), 0), buf2, buf2, None, None, None, 16, 16, 0.0, False, scale=0.25)
        buf10 = buf9[0]
        buf11 = buf9[1]
        buf12 = buf9[2]
        buf13 = buf1; del buf1  # reuse
        triton_poi_fused_attention_backward_1.run(buf11, buf12, buf13, 512, stream=raw_stream0)
        buf14 = torch.ops._c10d_functional.all_to_all_single.default(buf13, [0, 0], [512, 0], '0')
        torch.ops._c10d_functional.wait_tensor.default(buf14)
        buf17 = buf4; del buf4  # reuse
        triton_poi_fused_attention_backward_2.run(buf17, buf10, 512, stream=raw_stream0)
    return (buf17, buf5, buf6, )
""",
        )
