"""The networks of ``benchmarks/zoo.py``: a name, and a function that builds the network with example inputs.

Networks of torchvision and timm have their published sizes. Those of transformers have the published architecture with
fewer and narrower layers, so that a run takes seconds; `find_groups` treats every layer alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsa_hw.zoo.models import load_model
from dsa_hw.zoo.torchvision_compat import torchvision

Example = tuple[nn.Module, tuple[Any, ...] | dict[str, Any]]

# Published input sizes where the network accepts no small one; sides of 64 to 128 elsewhere.
DENSE = {
    **{f"segmentation/{n}": (1, 3, 64, 64) for n in torchvision.models.list_models(torchvision.models.segmentation)},
    **{f"video/{n}": (1, 3, 8, 64, 64) for n in ("mc3_18", "r2plus1d_18", "r3d_18")},
    "video/s3d": (1, 3, 16, 224, 224),
    **{f"video/{n}": (1, 3, 16, 224, 224) for n in ("mvit_v1_b", "mvit_v2_s")},
    **{f"video/swin3d_{n}": (1, 3, 4, 64, 64) for n in "tsb"},
    **{f"optical_flow/{n}": (1, 3, 128, 128) for n in ("raft_small", "raft_large")},
}

SMP: tuple[str, ...] = (
    "Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "PAN", "UPerNet",
    "Segformer",
)  # fmt: skip

YOLO = ("yolov5n", "yolov8n", "yolov8n-seg", "yolov8n-pose", "yolov9t", "yolov10n", "yolo11n", "yolo12n")

TIMM = """
bat_resnext26ts beit_base_patch16_224 beitv2_base_patch16_224 botnet26t_256 caformer_s18 cait_xxs24_224 coat_lite_tiny
coat_tiny coatnet_0_rw_224 coatnext_nano_rw_224 convformer_s18 convit_tiny convmixer_768_32 convnext_atto
convnextv2_atto crossvit_tiny_240 cs3darknet_s cspdarknet53 cspresnet50 cspresnext50 darknet53 davit_tiny
deit3_small_patch16_224 deit_tiny_distilled_patch16_224 deit_tiny_patch16_224 densenet121 dla34 dla46x_c dm_nfnet_f0
dpn48b dpn68 eca_botnext26ts_256 eca_halonext26ts eca_nfnet_l0 eca_resnet33ts ecaresnet26t edgenext_xx_small
efficientformer_l1 efficientformerv2_s0 efficientnet_b0 efficientnetv2_rw_t efficientvit_b0 efficientvit_m0
ese_vovnet19b_dw eva02_tiny_patch14_224 fastvit_t8 fbnetc_100 fbnetv3_b flexivit_small focalnet_tiny_srf
gc_efficientnetv2_rw_t gcresnet33ts gcvit_xxtiny gernet_s ghostnet_100 ghostnetv2_100 ghostnetv3_100 gmixer_12_224
gmlp_ti16_224 halonet26t hardcorenas_a hgnet_tiny hgnetv2_b0 hiera_tiny_224 hieradet_small hrnet_w18_small
inception_next_tiny inception_resnet_v2 inception_v4 lambda_resnet26t lamhalobotnet50ts_256 lcnet_050 levit_128s
levit_conv_128s mambaout_femto maxvit_rmlp_pico_rw_256 maxvit_tiny_tf_224 maxxvit_rmlp_nano_rw_256 mixer_s32_224
mixnet_s mnasnet_small mobilenet_edgetpu_v2_xs mobilenetv1_100 mobilenetv2_050 mobilenetv3_small_100
mobilenetv4_conv_small mobilenetv4_hybrid_medium mobilenetv5_base mobileone_s0 mobilevit_xxs mobilevitv2_050
mvitv2_tiny naflexvit_base_patch16_gap nasnetalarge nest_tiny nextvit_small nf_regnet_b1 nf_resnet26 nfnet_l0
pit_ti_224 pnasnet5large poolformer_s12 poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnetv_040 regnetx_002 regnety_002
regnetz_b16 repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_14w_8s res2next50 resmlp_12_224 resnest14d resnet18d
resnet50_gn resnetblur18 resnetrs50 resnetv2_50 resnext26ts rexnet_100 samvit_base_patch16_224 sebotnet33ts_256
sedarknet21 sehalonet33ts selecsls42b semnasnet_050 senet154 sequencer2d_s seresnet18 seresnext26d_32x4d shvit_s1
skresnet18 spnasnet_100 starnet_s1 swiftformer_xs swin_s3_tiny_224 swin_tiny_patch4_window7_224 swinv2_cr_tiny_224
swinv2_tiny_window8_256 test_convnext test_vit tf_efficientnetv2_b0 tiny_vit_5m_224 tinynet_e tnt_s_patch16_224
tresnet_m twins_pcpvt_small twins_svt_small vgg11_bn visformer_tiny vit_base_patch32_clip_224
vit_medium_patch16_gap_256 vit_relpos_small_patch16_224 vit_small_patch14_dinov2 vit_small_patch16_dinov3
vit_small_r26_s32_224 vit_so150m_patch16_reg4_gap_256 vit_srelpos_small_patch16_224 vit_tiny_patch16_224
vit_wee_patch16_reg1_gap_256 volo_d1_224 vovnet39a wide_resnet50_2 xception41 xception71 xcit_nano_12_p16_224
""".split()  # noqa: SIM905  (a table to read)


def _transformers() -> dict[str, Any]:
    """Name -> (class of the configuration, class of the network, settings, inputs)."""
    words = {"input_ids": (1, 12)}
    image = {"pixel_values": (1, 3, 64, 64)}
    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    lexicon = {"vocab_size": 101}
    vision = {**small, "image_size": 64, "patch_size": 16}
    tiny_llm = {**small, **lexicon, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    gqa = {**tiny_llm, "num_key_value_heads": 2}
    gpt = {"n_embd": 48, "n_layer": 2, "n_head": 4, **lexicon}
    bart = {
        **lexicon,
        "d_model": 48,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }
    t5 = {
        **lexicon,
        "d_model": 48,
        "d_kv": 12,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
    pair = {"input_ids": (1, 12), "decoder_input_ids": (1, 10)}
    swin = {"embed_dim": 24, "depths": [2, 2], "num_heads": [3, 6], "window_size": 4, "image_size": 64, "patch_size": 4}
    detr = {
        **{k: v for k, v in bart.items() if k in ("d_model", "encoder_layers", "decoder_layers")},
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "num_queries": 10,
        "use_pretrained_backbone": False,
        "use_timm_backbone": False,
        "backbone": None,
    }
    audio = {**small, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    audio |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, **lexicon}
    clip = {"text_config": {**small, **lexicon}, "vision_config": vision, "projection_dim": 32}
    pix = {"input_ids": (1, 12), "pixel_values": (1, 3, 64, 64)}
    return {
        "bert": ("BertConfig", "BertForSequenceClassification", {**small, **lexicon}, words),
        "bert-mlm-tied": ("BertConfig", "BertForMaskedLM", {**small, **lexicon}, words),
        "roberta": ("RobertaConfig", "RobertaForSequenceClassification", {**small, **lexicon}, words),
        "distilbert": (
            "DistilBertConfig",
            "DistilBertForSequenceClassification",
            {**lexicon, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
            words,
        ),
        "albert": (
            "AlbertConfig",
            "AlbertForSequenceClassification",
            {**small, **lexicon, "embedding_size": 24},
            words,
        ),
        "electra": (
            "ElectraConfig",
            "ElectraForSequenceClassification",
            {**small, **lexicon, "embedding_size": 24},
            words,
        ),
        "mobilebert": (
            "MobileBertConfig",
            "MobileBertForSequenceClassification",
            {
                **lexicon,
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 96,
                "embedding_size": 24,
                "intra_bottleneck_size": 24,
                "true_hidden_size": 24,
            },
            words,
        ),
        "deberta-v2": ("DebertaV2Config", "DebertaV2ForSequenceClassification", {**small, **lexicon}, words),
        "modernbert": (
            "ModernBertConfig",
            "ModernBertForSequenceClassification",
            {
                **small,
                **lexicon,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "cls_token_id": 1,
                "sep_token_id": 2,
            },
            words,
        ),
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**gpt, "use_cache": False}, words),
        "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**tiny_llm, "use_cache": False}, words),
        "opt": (
            "OPTConfig",
            "OPTForCausalLM",
            {
                **lexicon,
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "ffn_dim": 96,
                "word_embed_proj_dim": 48,
                "use_cache": False,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            words,
        ),
        "llama": ("LlamaConfig", "LlamaForCausalLM", {**tiny_llm, "use_cache": False}, words),
        "llama-grouped-queries": ("LlamaConfig", "LlamaForCausalLM", {**gqa, "use_cache": False}, words),
        "mistral": ("MistralConfig", "MistralForCausalLM", {**gqa, "use_cache": False}, words),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**gqa, "use_cache": False}, words),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**gqa, "head_dim": 12, "use_cache": False}, words),
        "gemma": ("GemmaConfig", "GemmaForCausalLM", {**gqa, "head_dim": 12, "use_cache": False}, words),
        "phi": ("PhiConfig", "PhiForCausalLM", {**tiny_llm, "use_cache": False}, words),
        "t5": ("T5Config", "T5ForConditionalGeneration", {**t5, "use_cache": False}, pair),
        "bart": ("BartConfig", "BartForConditionalGeneration", {**bart, "use_cache": False}, pair),
        "vit": ("ViTConfig", "ViTForImageClassification", vision, image),
        "deit": ("DeiTConfig", "DeiTForImageClassification", vision, image),
        "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", {**vision, "mlp_ratio": 2}, image),
        "beit": ("BeitConfig", "BeitForImageClassification", {**vision, "use_relative_position_bias": True}, image),
        "swin": ("SwinConfig", "SwinForImageClassification", swin, image),
        "swinv2": ("Swinv2Config", "Swinv2ForImageClassification", swin, image),
        "convnext": (
            "ConvNextConfig",
            "ConvNextForImageClassification",
            {"hidden_sizes": [24, 32, 48, 64], "depths": [1, 1, 2, 1], "image_size": 64},
            image,
        ),
        "resnet": (
            "ResNetConfig",
            "ResNetForImageClassification",
            {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2]},
            image,
        ),
        "mobilevit": ("MobileViTConfig", "MobileViTForImageClassification", {"image_size": 64}, image),
        "mobilenet-v2": ("MobileNetV2Config", "MobileNetV2ForImageClassification", {}, image),
        "pvt-v2": ("PvtV2Config", "PvtV2ForImageClassification", {"hidden_sizes": [16, 32, 40, 64]}, image),
        "segformer": (
            "SegformerConfig",
            "SegformerForSemanticSegmentation",
            {"depths": [1, 1, 1, 1], "decoder_hidden_size": 32},
            image,
        ),
        "mobilevit-segmentation": ("MobileViTConfig", "MobileViTForSemanticSegmentation", {"image_size": 64}, image),
        "dpt": (
            "DPTConfig",
            "DPTForDepthEstimation",
            {
                **vision,
                "num_hidden_layers": 4,
                "backbone_out_indices": [0, 1, 2, 3],
                "neck_hidden_sizes": [16, 24, 32, 32],
                "fusion_hidden_size": 24,
                "head_in_index": -1,
            },
            image,
        ),
        "yolos": (
            "YolosConfig",
            "YolosForObjectDetection",
            {**small, "image_size": [64, 64], "num_detection_tokens": 10},
            image,
        ),
        "detr": ("DetrConfig", "DetrForObjectDetection", detr, image),
        "rt-detr": (
            "RTDetrConfig",
            "RTDetrForObjectDetection",
            {
                "d_model": 32,
                "encoder_hidden_dim": 32,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "num_queries": 20,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "num_denoising": 0,
                "anchor_image_size": None,
                "decoder_in_channels": [32, 32, 32],
            },
            {"pixel_values": (1, 3, 128, 128)},
        ),
        "wav2vec2": (
            "Wav2Vec2Config",
            "Wav2Vec2ForCTC",
            {**audio, "num_feat_extract_layers": 2},
            {"input_values": (1, 400)},
        ),
        "hubert": ("HubertConfig", "HubertForCTC", audio, {"input_values": (1, 400)}),
        "whisper": (
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            {**bart, "num_mel_bins": 16, "max_source_positions": 20, "use_cache": False},
            {"input_features": (1, 16, 40), "decoder_input_ids": (1, 10)},
        ),
        "audio-spectrogram": (
            "ASTConfig",
            "ASTForAudioClassification",
            {**small, "max_length": 48, "num_mel_bins": 32},
            {"input_values": (1, 48, 32)},
        ),
        "clip": ("CLIPConfig", "CLIPModel", clip, pix),
        "siglip": ("SiglipConfig", "SiglipModel", {k: v for k, v in clip.items() if k != "projection_dim"}, pix),
        "videomae": (
            "VideoMAEConfig",
            "VideoMAEForVideoClassification",
            {**vision, "num_frames": 4},
            {"pixel_values": (1, 4, 3, 64, 64)},
        ),
    }


TRANSFORMERS = _transformers()


class SuperResolution(nn.Module):
    """Residual blocks, then a pixel shuffle by two (the form of EDSR)."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(blocks)
        )
        self.up = nn.Sequential(nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2))
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return an image of twice the side."""
        x = self.first(image)
        y = x
        for block in self.blocks:
            y = y + block(y)
        return self.last(self.up(x + y))


class Decoder(nn.Module):
    """An encoder, and a decoder of transposed convolutions (the form of an autoencoder)."""

    def __init__(self) -> None:
        super().__init__()
        down = [(3, 16), (16, 32), (32, 64)]
        self.down = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in down)
        )
        self.up = nn.Sequential(
            nn.ConvTranspose2d(64, 32, 4, 2, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, 2, 1),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the reconstructed image."""
        return self.up(self.down(image))


class Recurrent(nn.Module):
    """An embedding, a recurrent network and a classifier."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM], bidirectional: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 32)
        self.rnn = kind(32, 48, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(96 if bidirectional else 48, 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the scores of the last word."""
        return self.head(self.rnn(self.embedding(words))[0][:, -1])


OWN: dict[str, Any] = {
    "own/super-resolution": lambda: (SuperResolution(), (torch.randn(1, 3, 24, 24),)),
    "own/transposed-decoder": lambda: (Decoder(), (torch.randn(1, 3, 32, 32),)),
    "own/lstm": lambda: (Recurrent(nn.LSTM), (torch.randint(0, 101, (1, 12)),)),
    "own/gru": lambda: (Recurrent(nn.GRU), (torch.randint(0, 101, (1, 12)),)),
    "own/bidirectional-lstm": lambda: (Recurrent(nn.LSTM, True), (torch.randint(0, 101, (1, 12)),)),
    "own/transformer-encoder": lambda: (
        nn.Sequential(
            nn.Embedding(101, 48),
            nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True), 2),
            nn.Linear(48, 10),
        ),
        (torch.randint(0, 101, (1, 12)),),
    ),
}


def names() -> list[str]:
    """Return the names of all networks."""
    return [
        *torchvision.models.list_models(module=torchvision.models),
        *DENSE,
        *(f"smp/{name}" for name in SMP),
        *(f"ultralytics/{name}" for name in YOLO),
        *(f"transformers/{name}" for name in TRANSFORMERS),
        *OWN,
        *(f"timm/{name}" for name in TIMM),
    ]


def build(name: str) -> Example:
    """Build a network in evaluation mode with random weights, and example inputs."""
    torch.manual_seed(0)
    family, _, leaf = name.partition("/")
    if name in OWN:
        model, inputs = OWN[name]()
    elif name in DENSE:
        options = {"weights_backbone": None} if family == "segmentation" else {}
        model = torchvision.models.get_model(leaf, weights=None, **options)
        image = torch.randn(DENSE[name])
        inputs = (image, torch.randn_like(image)) if family == "optical_flow" else (image,)
        if family == "optical_flow":
            inputs = (*inputs, 3)  # updates
    elif family == "smp":
        import segmentation_models_pytorch

        model = getattr(segmentation_models_pytorch, leaf)("resnet18", encoder_weights=None)
        inputs = (torch.randn(1, 3, 128, 128),)  # the least that all of them accept
    elif family == "ultralytics":
        model, inputs = _yolo(leaf)
    elif family == "transformers":
        model, inputs = _transformer(leaf)
    else:
        model, inputs = load_model(name)
    return model.eval(), inputs


def _yolo(name: str) -> Example:
    from ultralytics import YOLO

    return YOLO(f"{name}.yaml", verbose=False).model, (torch.randn(1, 3, 128, 128),)


def _transformer(name: str) -> Example:
    import transformers

    config_name, model_name, settings, shapes = TRANSFORMERS[name]
    if name == "detr":
        backbone = transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], out_features=["stage2"]
        )
        settings = {**settings, "backbone_config": backbone}
    if name == "rt-detr":
        backbone = transformers.RTDetrResNetConfig(
            embedding_size=16,
            hidden_sizes=[16, 24, 32, 48],
            depths=[1, 1, 1, 1],
            out_features=["stage2", "stage3", "stage4"],
        )
        settings = {
            **settings,
            "backbone_config": backbone,
            "encoder_in_channels": [24, 32, 48],
            "feat_strides": [8, 16, 32],
        }
    config = getattr(transformers, config_name)(**settings)
    model = getattr(transformers, model_name)(config)
    inputs = {
        key: torch.randint(3, 101, shape) if key.endswith("ids") else torch.randn(shape)
        for key, shape in shapes.items()
    }
    return model, inputs
