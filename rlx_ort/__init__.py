"""rlx_ort"""
