from mtgrpo.tools import ToolError


async def search(query: str, book: str = "", hits: int = 3) -> str:
    """Search the book.

    Args:
        query: what to look for
        hits: how many lines, at most
    """
    with open(book) as lines:
        found = [line.strip() for line in lines if query in line]
    if not found:
        raise ToolError(f"nothing about {query!r}")
    return "\n".join(found[:hits])
