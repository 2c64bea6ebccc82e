"""as2ray's rankers inside other frameworks, a file each; extra `adapters`.

Know their framework and rankers. Must not know Ray or the service.
"""
