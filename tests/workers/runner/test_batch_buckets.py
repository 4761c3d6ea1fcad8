import pytest

from tandem.workers.runner.batch_buckets import bucket_of, bucket_sizes


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_sizes(limit: int, sizes: list[int]) -> None:
    assert bucket_sizes(limit) == sizes


def test_wide_steps_have_few_graphs() -> None:
    assert len(bucket_sizes(256)) == 35
    assert bucket_sizes(512)[34:] == [256, 288, 320, 352, 384, 416, 448, 480, 512]
    assert bucket_sizes(257)[-2:] == [256, 257]


@pytest.mark.parametrize("limit", [1, 5, 8, 100, 256, 300, 512])
def test_every_batch_has_the_least_bucket_that_holds_it(limit: int) -> None:
    sizes = bucket_sizes(limit)
    for rows in range(1, limit + 1):
        assert sizes[bucket_of(sizes, rows)] == min(size for size in sizes if size >= rows)
    with pytest.raises(ValueError, match=f"rows is {limit + 1}; at most {limit} fit"):
        bucket_of(sizes, limit + 1)
